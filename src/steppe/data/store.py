"""The data sets in the data directory: what is there, whether it is whole, and getting what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from steppe.data import cifar100, mnist, tiny_imagenet
from steppe.data.archives import unpack
from steppe.data.catalogue import DATA_SETS, Archive, DataSet, find_data_set
from steppe.data.directory import data_directory, explain_storage_errors, missing_error
from steppe.data.download import Progress, download, find_mismatch, part_paths
from steppe.data.tiny_imagenet import TinyImageNet
from steppe.errors import DataError, os_error_text

Report = Callable[[str], None]
"""Told in a line what is being done."""


@dataclass(frozen=True)
class Copy:
    """A form of a data set in the data directory, and the archive that it is or comes from."""

    path: Path
    archive: Archive

    @property
    def is_packed(self) -> bool:
        return self.path.name == self.archive.name


@dataclass(frozen=True)
class CheckResult:
    """What came of checking one form of a data set."""

    path: Path
    is_complete: bool
    text: str


def find_copies(name: str) -> list[Copy]:
    """The forms of a data set that are there, the one that is read first: folders before archives."""
    directory, archives = data_directory(), find_data_set(name).archives
    folders = [Copy(directory / archive.folder, archive) for archive in archives]
    packed = [Copy(directory / archive.name, archive) for archive in archives]
    return [form for form in folders + packed if form.path.exists()]


def locate(name: str) -> Path:
    """The file or folder that the data set is read from."""
    entry = find_data_set(name)
    if not entry.archives:
        return Path(mnist.__file__).parent / name
    forms = find_copies(name)
    if not forms:
        raise missing_error(entry.title, name)
    return forms[0].path


def describe_status(name: str) -> str:
    """In a few words whether the data set is there; looks at names only, `verify` reads it."""
    entry = find_data_set(name)
    if not entry.archives:
        return "in the package"
    forms = find_copies(name)
    if forms:
        return "there" + (" (packed)" if forms[0].is_packed else _partial_remark(forms[0]))
    for archive in entry.archives:
        part = data_directory() / f"{archive.name}.part"
        if part.exists():
            return f"fetched in part ({100 * part.stat().st_size // archive.size} %)"
    return f"not there ({entry.archives[0].size / 1e6:.0f} MB to fetch)"


def verify(name: str, progress: Progress = lambda done, total: None) -> list[CheckResult]:
    """Read every form of the data set that is there and say of each whether it is whole."""
    entry = find_data_set(name)
    if not entry.archives:
        mnist.load.cache_clear()
        mnist.load()
        return [CheckResult(locate(name), True, "every file has its hash")]
    forms = find_copies(name)
    if not forms:
        raise missing_error(entry.title, name)
    return [_check(entry, form, progress) for form in forms]


def fetch(name: str, progress: Progress = lambda done, total: None, report: Report = lambda line: None) -> Path:
    """Make sure that the data set is there and whole; returns the folder.

    An archive that lies in the data directory already is used rather than fetched anew, and stays; what was fetched is
    removed once it is unpacked, by the next call where this one is stopped. A set that is whole needs no writing.
    """
    entry = find_data_set(name)
    if not entry.archives:
        return locate(name)
    with ExitStack() as held:
        try:
            held.enter_context(_locked(name))
        except DataError:  # nothing can be written here, or another process is at it: no matter if all is there
            folder = _complete_folder(entry, progress, report)
            if folder is None:
                raise
            return folder
        folder = _complete_folder(entry, progress, report) or _unpack_archive(entry, progress, report)
        _remove_leftovers(entry, report)
    return folder


def _complete_folder(entry: DataSet, progress: Progress, report: Report) -> Path | None:
    """The folder that holds all of the data set, if one does."""
    for form in find_copies(entry.name):
        if form.is_packed:
            continue
        check = _check(entry, form, progress)
        if check.is_complete and not _partial_remark(form):
            report(f"{entry.title} is in {form.path} already: {check.text}.")
            return form.path
        report(f"{form.path} is not the whole set ({check.text}).")
    return None


def _unpack_archive(entry: DataSet, progress: Progress, report: Report) -> Path:
    """Unpack an archive, fetched where there is none, and check what comes of it."""
    archive, path = _obtain_archive(entry, progress, report)
    report(f"unpacking {archive.name}")
    folder = unpack(path, archive.folder)
    check = _check(entry, Copy(folder, archive), progress)
    if not check.is_complete:
        raise DataError(f"{entry.title} was unpacked, but is not whole: {check.text}")
    report(f"{entry.title} is in {folder}: {check.text}.")
    return folder


def _remove_leftovers(entry: DataSet, report: Report) -> None:
    """Remove what fetching left behind; the set is there without it, so that a refusal is only told."""
    for archive in entry.archives:
        for path in part_paths(archive, data_directory()):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                report(f"{path} is of no more use, but cannot be removed: {os_error_text(error)}.")


def _obtain_archive(entry: DataSet, progress: Progress, report: Report) -> tuple[Archive, Path]:
    """An archive of the data set that is right, and where it lies."""
    directory = data_directory()
    for archive in entry.archives:
        path = directory / archive.name
        if path.exists():
            problem = find_mismatch(path, archive)
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
        with explain_storage_errors(directory):
            (directory / archive.name).unlink(missing_ok=True)  # passed over above: damaged, and now replaced
        return archive, path
    raise DataError("\n".join(failures))


def _check(entry: DataSet, form: Copy, progress: Progress) -> CheckResult:
    try:
        if form.is_packed:
            problem = find_mismatch(form.path, form.archive)
            return CheckResult(form.path, problem is None, problem or "the publisher's archive, by its hash")
        return CheckResult(form.path, True, _READERS[entry.name](form.path, progress))
    except DataError as error:
        return CheckResult(form.path, False, str(error))


def _cifar100(path: Path, progress: Progress) -> str:
    cifar100.read(cifar100.Form(path, binary="binary" in path.name))
    return "60,000 images, each by its hash"


def _tiny_imagenet(path: Path, progress: Progress) -> str:
    images = TinyImageNet(tiny_imagenet.FolderSource(path))
    count = images.decode_all(progress)
    return f"{count:,} images of {len(images.classes)} classes, all of which can be decoded"


_READERS: dict[str, Callable[[Path, Progress], str]] = {"cifar-100": _cifar100, "tiny-imagenet": _tiny_imagenet}


def _partial_remark(form: Copy) -> str:
    """A remark where a folder of TinyImageNet holds some of the classes only."""
    if form.path.name != tiny_imagenet.NAME:
        return ""
    count = sum(1 for _ in form.path.glob("train/n*"))
    return "" if count == 200 else f" ({count} of 200 classes)"


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Refuse to fetch what another process is fetching; the lock goes with its holder, however that ends."""
    directory = data_directory()
    with explain_storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / f".{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise DataError(f"{DATA_SETS[name].title} is being fetched by another process: wait for it.") from None
    try:
        yield
    finally:
        lock.release()
