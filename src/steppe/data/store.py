"""The data sets in the data directory: what is there, whether it is whole, and getting what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from steppe.data import cifar100, mnist, tiny_imagenet
from steppe.data.archives import unpack
from steppe.data.catalogue import SETS, Archive, DataSet, find
from steppe.data.directory import data_directory, filling, missing
from steppe.data.download import Progress, differs, download, parts
from steppe.data.tiny_imagenet import TinyImageNet
from steppe.errors import DataError, os_error_text

Report = Callable[[str], None]
"""Told in a line what is being done."""


@dataclass(frozen=True)
class Found:
    """A form of a data set in the data directory, and the archive that it is or comes from."""

    path: Path
    archive: Archive

    @property
    def packed(self) -> bool:
        return self.path.name == self.archive.name


@dataclass(frozen=True)
class Check:
    """What came of checking one form of a data set."""

    path: Path
    whole: bool
    text: str


def found(name: str) -> list[Found]:
    """The forms of a data set that are there, the one that is read first: folders before archives."""
    directory, archives = data_directory(), find(name).archives
    folders = [Found(directory / archive.folder, archive) for archive in archives]
    packed = [Found(directory / archive.name, archive) for archive in archives]
    return [form for form in folders + packed if form.path.exists()]


def where(name: str) -> Path:
    """The file or folder that the data set is read from."""
    entry = find(name)
    if not entry.archives:
        return Path(mnist.__file__).parent / name
    forms = found(name)
    if not forms:
        raise missing(entry.title, name)
    return forms[0].path


def state(name: str) -> str:
    """In a few words whether the data set is there; looks at names only, `verify` reads it."""
    entry = find(name)
    if not entry.archives:
        return "in the package"
    forms = found(name)
    if forms:
        return "there" + (" (packed)" if forms[0].packed else _share(forms[0]))
    for archive in entry.archives:
        part = data_directory() / f"{archive.name}.part"
        if part.exists():
            return f"fetched in part ({100 * part.stat().st_size // archive.size} %)"
    return f"not there ({entry.archives[0].size / 1e6:.0f} MB to fetch)"


def verify(name: str, progress: Progress = lambda done, total: None) -> list[Check]:
    """Read every form of the data set that is there and say of each whether it is whole."""
    entry = find(name)
    if not entry.archives:
        mnist.load.cache_clear()
        mnist.load()
        return [Check(where(name), True, "every file has its hash")]
    forms = found(name)
    if not forms:
        raise missing(entry.title, name)
    return [_check(entry, form, progress) for form in forms]


def fetch(name: str, progress: Progress = lambda done, total: None, report: Report = lambda line: None) -> Path:
    """Make sure that the data set is there and whole; returns the folder.

    An archive that lies in the data directory already is used rather than fetched anew, and stays; what was fetched is
    removed once it is unpacked, by the next call where this one is stopped. A set that is whole needs no writing.
    """
    entry = find(name)
    if not entry.archives:
        return where(name)
    with ExitStack() as held:
        try:
            held.enter_context(_alone(name))
        except DataError:  # nothing can be written here, or another process is at it: no matter if all is there
            folder = _whole_folder(entry, progress, report)
            if folder is None:
                raise
            return folder
        folder = _whole_folder(entry, progress, report) or _bring(entry, progress, report)
        _tidy(entry, report)
    return folder


def _whole_folder(entry: DataSet, progress: Progress, report: Report) -> Path | None:
    """The folder that holds all of the data set, if one does."""
    for form in found(entry.name):
        if form.packed:
            continue
        check = _check(entry, form, progress)
        if check.whole and not _share(form):
            report(f"{entry.title} is in {form.path} already: {check.text}.")
            return form.path
        report(f"{form.path} is not the whole set ({check.text}).")
    return None


def _bring(entry: DataSet, progress: Progress, report: Report) -> Path:
    """Unpack an archive, fetched where there is none, and check what comes of it."""
    archive, path = _archive(entry, progress, report)
    report(f"unpacking {archive.name}")
    folder = unpack(path, archive.folder)
    check = _check(entry, Found(folder, archive), progress)
    if not check.whole:
        raise DataError(f"{entry.title} was unpacked, but is not whole: {check.text}")
    report(f"{entry.title} is in {folder}: {check.text}.")
    return folder


def _tidy(entry: DataSet, report: Report) -> None:
    """Remove what fetching left behind; the set is there without it, so that a refusal is only told."""
    for archive in entry.archives:
        for path in parts(archive, data_directory()):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                report(f"{path} is of no more use, but cannot be removed: {os_error_text(error)}.")


def _archive(entry: DataSet, progress: Progress, report: Report) -> tuple[Archive, Path]:
    """An archive of the data set that is right, and where it lies."""
    directory = data_directory()
    for archive in entry.archives:
        path = directory / archive.name
        if path.exists():
            problem = differs(path, archive)
            report(f"{path} " + ("is the publisher's" if problem is None else f"is passed over: {problem}"))
            if problem is None:
                return archive, path
    failures = []
    for archive in entry.archives:
        report(f"fetching {archive.name} ({archive.size / 1e6:.0f} MB; {entry.origin}; {entry.licence})")
        try:
            path = download(archive, directory, progress)
        except DataError as error:
            failures.append(str(error))
            continue
        with filling(directory):
            (directory / archive.name).unlink(missing_ok=True)  # passed over above: damaged, and now replaced
        return archive, path
    raise DataError("\n".join(failures))


def _check(entry: DataSet, form: Found, progress: Progress) -> Check:
    try:
        if form.packed:
            problem = differs(form.path, form.archive)
            return Check(form.path, problem is None, problem or "the publisher's archive, by its hash")
        return Check(form.path, True, _READERS[entry.name](form.path, progress))
    except DataError as error:
        return Check(form.path, False, str(error))


def _cifar100(path: Path, progress: Progress) -> str:
    cifar100.read(cifar100.Form(path, binary="binary" in path.name))
    return "60,000 images, each by its hash"


def _tiny_imagenet(path: Path, progress: Progress) -> str:
    images = TinyImageNet(tiny_imagenet.FolderSource(path))
    count = images.decode_all(progress)
    return f"{count:,} images of {len(images.classes)} classes, all of which can be decoded"


_READERS: dict[str, Callable[[Path, Progress], str]] = {"cifar-100": _cifar100, "tiny-imagenet": _tiny_imagenet}


def _share(form: Found) -> str:
    """A remark where a folder of TinyImageNet holds some of the classes only."""
    if form.path.name != tiny_imagenet.NAME:
        return ""
    count = sum(1 for _ in form.path.glob("train/n*"))
    return "" if count == 200 else f" ({count} of 200 classes)"


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Refuse to fetch what another process is fetching; the lock goes with its holder, however that ends."""
    directory = data_directory()
    with filling(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / f".{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise DataError(f"{SETS[name].title} is being fetched by another process: wait for it.") from None
    try:
        yield
    finally:
        lock.release()
