"""The data sets in the data directory: find, fetch and verify them."""

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
"""Receives a line about what is being done."""


@dataclass(frozen=True)
class Copy:
    """A copy of a data set in the data directory: the publisher's folder or archive."""

    path: Path
    archive: Archive

    @property
    def is_packed(self) -> bool:
        """Whether it is the archive."""
        return self.path.name == self.archive.name


@dataclass(frozen=True)
class CheckResult:
    """The result of checking a copy; `text` says what was checked, or what is wrong."""

    path: Path
    is_complete: bool
    text: str


def find_copies(name: str) -> list[Copy]:
    """The copies of a data set that exist, the one that is read first: the folder before the archive."""
    directory, archive = data_directory(), find_data_set(name).archive
    if archive is None:
        return []
    copies = [Copy(directory / archive.folder, archive), Copy(directory / archive.name, archive)]
    return [copy for copy in copies if copy.path.exists()]


def locate(name: str) -> Path:
    """The file or folder that the data set is read from; raises a DataError if there is none."""
    entry = find_data_set(name)
    if entry.archive is None:
        return Path(mnist.__file__).parent / name
    copies = find_copies(name)
    if not copies:
        raise missing_error(entry.title, name)
    return copies[0].path


def describe_status(name: str) -> str:
    """Whether the data set is present, in a few words. Only looks at file names; `verify` reads the files."""
    archive = find_data_set(name).archive
    if archive is None:
        return "bundled"
    copies = find_copies(name)
    if copies:
        return "there" + (" (packed)" if copies[0].is_packed else _partial_remark(copies[0]))
    part = data_directory() / f"{archive.name}.part"
    if part.exists():
        return f"partly fetched ({100 * part.stat().st_size // archive.size} %)"
    return f"not there ({archive.size / 1e6:.0f} MB to fetch)"


def verify(name: str, progress: Progress = lambda done, total: None) -> list[CheckResult]:
    """Read and check every copy of a data set.

    Args:
        name: The data set.
        progress: Called with the amount done and the total.

    Returns:
        The result for each copy.

    Raises:
        DataError: The data set is not in the data directory.
    """  # noqa: DOC501
    entry = find_data_set(name)
    if entry.archive is None:
        mnist.load.cache_clear()
        mnist.load()
        return [CheckResult(locate(name), True, "every file has its hash")]
    copies = find_copies(name)
    if not copies:
        raise missing_error(entry.title, name)
    return [_check(entry, copy, progress) for copy in copies]


def fetch(name: str, progress: Progress = lambda done, total: None, report: Report = lambda line: None) -> Path:
    """Make sure that a data set is present and complete.

    An archive that the user put into the data directory is used and kept. A downloaded one is removed once it is
    unpacked (by the next call, if this one is interrupted). If the set is complete, nothing is written.

    Args:
        name: The data set.
        progress: Called with the bytes done and their total.
        report: Called with a line about each step.

    Returns:
        The data set's folder.

    Raises:
        DataError: No mirror has it, it cannot be written, or another process is fetching it.
    """
    entry = find_data_set(name)
    archive = entry.archive
    if archive is None:
        return locate(name)
    with ExitStack() as stack:
        try:
            stack.enter_context(_locked(name))
        except DataError:  # read-only directory, or another process is fetching: fine if the set is complete
            folder = _complete_folder(entry, progress, report)
            if folder is None:
                raise
            return folder
        folder = _complete_folder(entry, progress, report) or _unpack_archive(entry, archive, progress, report)
        _remove_leftovers(archive, report)
    return folder


def _complete_folder(entry: DataSet, progress: Progress, report: Report) -> Path | None:
    """The folder, if it contains the complete data set."""
    for copy in find_copies(entry.name):
        if copy.is_packed:
            continue
        check = _check(entry, copy, progress)
        if check.is_complete and not _partial_remark(copy):
            report(f"{entry.title} is in {copy.path} already: {check.text}.")
            return copy.path
        report(f"{copy.path} is not complete ({check.text}).")
    return None


def _unpack_archive(entry: DataSet, archive: Archive, progress: Progress, report: Report) -> Path:
    """Unpack the archive, fetched if needed, and check the result."""
    path = _obtain_archive(entry, archive, progress, report)
    report(f"unpacking {archive.name}")
    folder = unpack(path, archive.folder)
    check = _check(entry, Copy(folder, archive), progress)
    if not check.is_complete:
        raise DataError(f"{entry.title} was unpacked but is not complete: {check.text}")
    report(f"{entry.title} is in {folder}: {check.text}.")
    return folder


def _remove_leftovers(archive: Archive, report: Report) -> None:
    """Remove partial downloads. If that fails, the data set is still there: only report it."""
    for path in part_paths(archive, data_directory()):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            report(f"{path} is no longer needed but cannot be removed: {os_error_text(error)}.")


def _obtain_archive(entry: DataSet, archive: Archive, progress: Progress, report: Report) -> Path:
    """The path of the publisher's archive, the user's own or a downloaded one."""
    directory = data_directory()
    own = directory / archive.name
    if own.exists():
        problem = find_mismatch(own, archive)
        report(f"{own} " + ("is the publisher's" if problem is None else f"is not used: {problem}"))
        if problem is None:
            return own
    report(f"fetching {archive.name} ({archive.size / 1e6:.0f} MB; {entry.origin}; {entry.licence})")
    path = download(archive, directory, progress)
    with explain_storage_errors(directory):
        own.unlink(missing_ok=True)  # damaged, and now replaced
    return path


def _check(entry: DataSet, form: Copy, progress: Progress) -> CheckResult:
    try:
        if form.is_packed:
            problem = find_mismatch(form.path, form.archive)
            return CheckResult(form.path, problem is None, problem or "the publisher's archive, by its hash")
        return CheckResult(form.path, True, _READERS[entry.name](form.path, progress))
    except DataError as error:
        return CheckResult(form.path, False, str(error))


def _cifar100(path: Path, progress: Progress) -> str:
    cifar100.read(path)
    return "60,000 images, all with the publisher's hashes"


def _tiny_imagenet(path: Path, progress: Progress) -> str:
    images = TinyImageNet(tiny_imagenet.FolderSource(path))
    count = images.decode_all(progress)
    return f"{count:,} images of {len(images.classes)} classes, all of which can be decoded"


_READERS: dict[str, Callable[[Path, Progress], str]] = {"cifar-100": _cifar100, "tiny-imagenet": _tiny_imagenet}


def _partial_remark(form: Copy) -> str:
    """A remark if a folder of TinyImageNet has only some of the classes."""
    if form.path.name != tiny_imagenet.NAME:
        return ""
    count = sum(1 for _ in form.path.glob("train/n*"))
    return "" if count == 200 else f" ({count} of 200 classes)"


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold the lock for fetching a data set, which is freed with the process, however that ends.

    Raises:
        DataError: Another process holds it, or the directory is not writable.
    """
    directory = data_directory()
    with explain_storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / f".{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise DataError(f"{DATA_SETS[name].title} is being fetched by another process; wait for it.") from None
    try:
        yield
    finally:
        lock.release()
