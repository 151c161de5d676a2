"""A user's own folder of images."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from steppe.cli.main import main
from steppe.data import decoding, folder
from steppe.errors import DataError, SteppeError
from steppe.experiments.config import RunConfig


def picture(path: Path, seed: int = 0, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


@pytest.fixture
def split(tmp_path: Path) -> Path:
    for part, count in (("train", 3), ("test", 2)):
        for name in ("dogs", "cats"):
            for place in range(count):
                picture(tmp_path / part / name / f"{place}.png", place)
    return tmp_path


def test_train_and_test_folders(split: Path) -> None:
    images = folder.load(split, 8)
    assert images.classes == ("cats", "dogs")
    x, y = images.select("train")
    assert x.dtype == torch.uint8
    assert (x.shape, y.tolist()) == ((6, 3, 8, 8), [0, 0, 0, 1, 1, 1])
    expected = np.array(Image.open(split / "train" / "cats" / "1.png")).transpose(2, 0, 1)
    assert np.array_equal(x[1].numpy(), expected)
    assert images.select("test", [1])[1].tolist() == [1, 1]


def test_val_folder_is_used_as_test(split: Path) -> None:
    expected = folder.load(split, 8).select("test")[0]
    (split / "test").rename(split / "val")
    assert torch.equal(folder.load(split, 8).select("test")[0], expected)


@pytest.mark.parametrize("suffix", [*folder.SUFFIXES, ".PNG", ".JPG"])
def test_formats(suffix: str, split: Path) -> None:
    picture(split / "train" / "cats" / f"zz{suffix}")
    assert len(folder.load(split, 8).select("train")[0]) == 7


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "CMYK"])
def test_every_mode_becomes_rgb(mode: str, split: Path) -> None:
    suffix = "jpg" if mode == "CMYK" else "png"
    picture(split / "train" / "cats" / f"zz.{suffix}", mode=mode)
    assert folder.load(split, 8).select("train")[0].shape == (7, 3, 8, 8)


def test_images_are_scaled(split: Path) -> None:
    picture(split / "train" / "cats" / "wide.png", size=(40, 10))
    assert folder.load(split, 16).select("train")[0].shape == (7, 3, 16, 16)


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:4] = 255  # above
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    for part in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.fromarray(pixels).save(tmp_path / part / name / "x.png", exif=exif)
    x, _ = folder.load(tmp_path, 8).select("train")
    assert x[0, :, 0].sum() == 0
    assert x[0, :, 7].min() == 255


def test_size_0_keeps_the_original_size(split: Path) -> None:
    assert folder.load(split, 0).select("train")[0].shape == (6, 3, 8, 8)
    picture(split / "train" / "dogs" / "wide.png", size=(9, 8))
    with pytest.raises(DataError, match=r"wide\.png has 9 × 8 pixels, .*0\.png 8 × 8; set a size"):
        folder.load(split, 0)


def test_images_are_decoded_again_only_if_changed(split: Path) -> None:
    first = folder.load(split, 8)
    assert folder.load(split, 8) is first
    picture(split / "train" / "cats" / "0.png", seed=7, size=(9, 9))
    assert not torch.equal(folder.load(split, 8).select("train")[0], first.select("train")[0])


def test_links_and_files_of_other_kinds(split: Path) -> None:
    (split / "train" / "cats" / "linked.png").symlink_to(split / "test" / "dogs" / "0.png")
    (split / "train" / "cats" / "notes.txt").write_text("hello")
    (split / "train" / "cats" / ".hidden.png").write_bytes(b"")
    (split / "train" / ".cache").mkdir()
    assert len(folder.load(split, 8).select("train", [0])[0]) == 4


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    for name in ("dogs", "cats"):
        for place in range(60):
            picture(tmp_path / name / f"{place}.png", place, (2, 2))
    return tmp_path


def test_a_share_of_each_class_is_held_out(whole: Path) -> None:
    images = folder.load(whole, 2, 0.3)
    (train_x, _), (test_x, test_y) = images.select("train"), images.select("test")
    assert len(train_x) + len(test_x) == 120
    assert all(6 <= count <= 30 for count in test_y.bincount().tolist())


def test_adding_images_does_not_move_others_between_parts(whole: Path) -> None:
    before = {path.name for path in folder._split(whole, 0.3)["test"]["cats"]}
    known = {path.name for path in (whole / "cats").iterdir()}
    for place in range(60, 90):
        picture(whole / "cats" / f"{place}.png", place, (2, 2))
    after = {path.name for path in folder._split(whole, 0.3)["test"]["cats"]}
    assert after & known == before
    assert after - known


def test_larger_share_only_adds_test_images(whole: Path) -> None:
    small, large = (set(folder._split(whole, share)["test"]["cats"]) for share in (0.2, 0.4))
    assert small < large


def test_file_names_need_not_be_utf_8(whole: Path) -> None:
    """Latin-1, as from an old archive; it is assigned to a part like any other."""
    before = {path.name for path in folder._split(whole, 0.3)["test"]["cats"]}
    for number in range(40):
        shutil.copy(whole / "cats" / "0.png", whole / "cats" / os.fsdecode(f"caf\xe9 {number}.png".encode("latin-1")))
    after = {path.name for path in folder._split(whole, 0.3)["test"]["cats"]}
    assert before < after
    assert len(folder.load(whole, 2, 0.3).select("train", [0])[0]) + len(after) == 100


@pytest.mark.parametrize(("name", "told"), [(b"caf\xe9", r"'caf\udce9'"), (b"a\x1b[2J", r"'a\x1b[2J'")])
def test_invalid_class_names_are_rejected(
    name: bytes, told: str, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (whole / "dogs").rename(whole / os.fsdecode(name))
    assert main(["run", f"folder:{whole}", "finetune", "--out", str(whole / "out")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"steppe: the name of the folder {told} in {whole} is not UTF-8 or has control")
    assert said.endswith("; rename it.\n")
    assert not (whole / "out").exists()


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty class": (lambda path: emptied(path / "train" / "cats"), "cats contains no images"),
    "class missing in test": (lambda path: shutil.rmtree(path / "test" / "cats"), "'cats' is in .*train but not in"),
    "class missing in train": (lambda path: shutil.rmtree(path / "train" / "cats"), "'cats' is in .*test but not in"),
    "one class": (
        lambda path: (shutil.rmtree(path / "train" / "cats"), shutil.rmtree(path / "test" / "cats")),
        r"1 folder\(s\) of images; expected at least two",
    ),
    "train alone": (lambda path: shutil.rmtree(path / "test"), r"folder train but no test \(or val\)"),
    "test alone": (lambda path: shutil.rmtree(path / "train"), "folder test but no train"),
    "broken file": (lambda path: (path / "test" / "dogs" / "1.png").write_bytes(b"PNG"), r"1\.png cannot be decoded"),
    "truncated file": (
        lambda path: (path / "test" / "dogs" / "1.png").write_bytes(
            (path / "test" / "dogs" / "0.png").read_bytes()[:-40]
        ),
        r"1\.png cannot be decoded",
    ),
    "no file": (lambda path: (path / "test" / "dogs" / "2.png").mkdir(), r"2\.png is missing or not a regular file"),
    "dangling link": (lambda path: (path / "test" / "dogs" / "2.png").symlink_to("nowhere"), r"2\.png is missing"),
    "not there": (lambda path: shutil.rmtree(path), "is not a directory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_folders_are_rejected(case: str, split: Path) -> None:
    spoil, message = REFUSED[case]
    spoil(split)
    with pytest.raises(DataError, match=message):
        folder.load(split, 8)


def test_image_with_too_many_pixels_is_rejected(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_PIXELS", 60)
    with pytest.raises(DataError, match=r"0\.png has 8 × 8 pixels, more than 60"):
        folder.load(split, 8)


def test_class_too_small_to_split(tmp_path: Path) -> None:
    """A single image cannot be split into training and test images; of two, one is used for each."""
    for name in ("dogs", "cats"):
        picture(tmp_path / name / "only.png")
    with pytest.raises(DataError, match=r"class 'cats' has 1 image\(s\); expected at least two"):
        folder.load(tmp_path, 8)
    for name in ("dogs", "cats"):
        picture(tmp_path / name / "other.png")
    for share in (0.001, 0.999):
        found = folder.load(tmp_path, 8, share)
        assert [len(found.select(part)[1]) for part in ("train", "test")] == [2, 2]


@pytest.mark.parametrize(("size", "share"), [(-1, 0.2), (8, 0.0), (8, 1.0), (8, float("nan"))])
def test_settings_out_of_range(size: int, share: float, whole: Path) -> None:
    with pytest.raises(SteppeError, match=r"size = -1|test_share = "):
        folder.load(whole, size, share)


def test_16_bit_images_keep_the_upper_8_bits_and_wider_are_rejected(tmp_path: Path) -> None:
    deep = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.fromarray(deep).save(tmp_path / name / f"{number}.png")
    found, _ = folder.load(tmp_path, 8).select("train")
    assert torch.equal(found[0, 0], torch.from_numpy((deep >> 8).astype(np.uint8)))
    with pytest.raises(DataError, match=r"wide.png has pixels of more than 16 bits"):
        decoding._to_eight_bits(Image.new("F", (8, 8)), "wide.png")


def test_a_study_of_a_folder_names_it_and_runs_from_anywhere(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(whole.parent)
    out = tmp_path_factory.mktemp("study") / "out"
    arguments = ["study", f"folder:{whole.name}", "finetune", "--seeds", "1", "--epochs", "1", "--out", str(out)]
    assert main([*arguments, "--set", "classes_per_task=1", "--set", "size=16"]) == 0
    command = json.loads((out / "table.json").read_text(encoding="utf-8"))["command"]
    assert f"benchmark.path={whole.name}" in command
    config = RunConfig.load(out / "finetune" / "seed-0" / "config.toml")
    assert config.as_dict()["benchmark"]["path"] == str(whole.resolve())
    assert json.loads((out / "finetune" / "seed-0" / "result.json").read_text(encoding="utf-8"))["full_length"] is False
    assert RunConfig.make(f"folder:{whole}", "finetune").is_canonical
