"""Files that appear whole or not at all, wherever their writer is stopped, and locks between processes.

A writer fills a file beside the destination, waits until it has reached the disk, and gives it its name in one step.
Until then it holds a lock on that file. Files of killed writers have none; the next writer in the folder removes them.
The system drops locks with the process that holds them, however it ends.
"""

import contextlib
import ctypes
import errno
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from .errors import OutputError
from .outside import printable

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_PREFIX, _SUFFIX = ".nestforge-", ".writing"
# Arguments of renameat2: paths as they are, and that they change places.
_HERE, _EXCHANGE = -100, 2
# How long a writer waits before it says so, and before it gives up: whoever may read a file may lock it for ever.
_SILENT_SECONDS = 1.0
_MOST_SECONDS = 60.0
_BETWEEN_SECONDS = 0.05
_logger = logging.getLogger("nestforge")


def write_whole(
    path: Path, write: Callable[[IO[bytes]], object], lost: str, *, new: bool = False, mode: int = 0o666
) -> None:
    """Lets ``write`` fill a file that becomes ``path``, in place of one that is there unless it must be ``new``.

    ``mode`` are the file's rights, less what the umask takes away. Raises OutputError, which says that ``lost``
    was not saved, where the system refuses; nothing is left then, nor where ``write`` raises anything else.
    """
    try:
        remove_unfinished(path.parent)
        with _claimed(path.parent, mode) as (beside, descriptor):
            with os.fdopen(descriptor, "wb", closefd=False) as stream:
                write(stream)
            os.fsync(descriptor)
            if new:
                name_new(beside, path)
            else:
                beside.replace(path)
        sync_folder(path.parent)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as failure:
        raise _refused(path, failure, f"; {lost} was not saved") from failure


def exchange(new: Path, old: Path) -> None:
    """Gives each of two paths of one file system the name of the other: in one step where the system can (Linux), else
    in three, between which ``old`` is missing for a moment. Raises OSError."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        if call(_HERE, os.fsencode(new.absolute()), _HERE, os.fsencode(old.absolute()), _EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise OSError(code, os.strerror(code), str(old))
    aside = new.with_name(f"{new.name}.aside")
    old.rename(aside)
    new.rename(old)
    aside.rename(new)


def put_in_place(folder: Path, output: Path, aside: Path | None) -> None:
    """Gives a ``folder`` the name ``output`` in one step, once it has reached the disk; what has that name lies
    ``aside`` then, if it is to be replaced. Raises OSError."""
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(inner)
    if aside is not None and os.path.lexists(output):
        exchange(folder, output)
        folder.rename(aside)
    else:
        folder.rename(output)
    sync_folder(output.parent)


def require_new(path: Path, overwrite: bool | None = None) -> None:
    """Before any work: raises OutputError for a path that exists, or in a folder where nothing can be written. With
    ``overwrite`` a file may exist; None where nobody can ask for that."""
    if overwrite and path.is_file():
        return
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        if not path.absolute().parent.is_dir():
            raise OutputError(f"{path}: cannot be written (no such folder)") from None
        if not _may_write(path.absolute().parent):
            raise OutputError(f"{path}: cannot be written (no right to write in its folder)") from None
    except OSError as failure:
        raise _refused(path, failure) from failure
    else:
        raise _exists(path, "" if overwrite is None else " or `overwrite=True`")
    finally:
        remove_unfinished(path.parent)  # of a path that exists too: its writer may have been killed after that


def require_writable(folder: Path, lost: str) -> None:
    """Before any work: raises OutputError, which says that ``lost`` could not be saved, for a folder where nothing can
    be written: of another user, or on a read-only file system."""
    if not _may_write(folder):
        raise OutputError(f"{folder}: cannot be written, so {lost} could not be saved; make it writable")


def remove_unfinished(folder: Path) -> None:
    """Removes what writers in ``folder`` left when they were killed."""
    with contextlib.suppress(OSError):
        for left in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
            with contextlib.suppress(OSError):  # its writer is at work, or it is not ours to remove
                descriptor = os.open(left, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    take_lock(descriptor)
                    _remove(left)
                finally:
                    os.close(descriptor)


@contextlib.contextmanager
def folder_beside(parent: Path) -> Iterator[Path]:
    """A new folder in ``parent``, of this user alone, to be filled and then renamed; what is left of it is removed."""
    with _claimed(parent, 0o600) as (claim, _):
        folder = _folder_of(claim)
        folder.mkdir(mode=0o700)
        yield folder


@contextlib.contextmanager
def exporting(output: Path) -> Iterator[Path]:
    """A folder beside ``output`` in which an export is made, and then gets its name. Raises OutputError where that
    cannot be written."""
    try:
        with folder_beside(output.parent) as folder:
            yield folder
    except FileExistsError:
        raise OutputError(f"{output}: exists already; choose another name") from None
    except OSError as failure:
        said = failure.strerror or failure
        raise OutputError(f"{output}: cannot be written ({said}); nothing was exported") from failure


def sync_folder(folder: Path) -> None:
    """Waits until the names in ``folder`` have reached the disk, where this user may open it."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _may_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


@contextlib.contextmanager
def _claimed(folder: Path, mode: int) -> Iterator[tuple[Path, int]]:
    """A new file in ``folder``, open and locked; removed unless it was renamed."""
    while True:
        path = folder / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            if _is_ours(path, descriptor):
                yield path, descriptor
                return
        finally:
            _remove(path)
            os.close(descriptor)


def _is_ours(path: Path, descriptor: int) -> bool:
    """Locks the new file; False if another process took it, before that, for one that a killed writer left."""
    try:
        take_lock(descriptor)
    except BlockingIOError:
        return False
    except OSError:  # where there are no locks nobody removes it either
        return True
    return path.exists()


def _remove(claim: Path) -> None:
    shutil.rmtree(_folder_of(claim), ignore_errors=True)
    with contextlib.suppress(OSError):
        claim.unlink()


def _folder_of(claim: Path) -> Path:
    return claim.with_suffix(".folder")


def name_new(beside: Path, path: Path) -> None:
    """Gives ``beside`` a second name, never over another file."""
    try:
        os.link(beside, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(path):
            raise FileExistsError from None
        beside.replace(path)


def _refused(path: Path, failure: OSError, lost: str = "") -> OutputError:
    return OutputError(f"{path}: cannot be written ({failure.strerror or failure}){lost}")


def _exists(path: Path, hint: str = "") -> OutputError:
    return OutputError(f"{path}: exists already; choose another file{hint}")


def take_lock(descriptor: int) -> None:
    """Locks an open file or folder until it is closed.

    Raises BlockingIOError if another process holds the lock, OSError where the system has none.
    """
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Waits until no other process is in this block with the same file or folder, where the system can lock it.

    Says so after a second, to the logger ``nestforge``. Raises OutputError after a minute.
    """
    descriptor = None
    try:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            _wait(path, descriptor)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def lock_holders(descriptor: int) -> str:
    """Who has the open file locked, as far as the system tells: ``process 12 (python)``."""
    status = os.fstat(descriptor)
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    found = []
    with contextlib.suppress(OSError), open("/proc/locks") as locks:
        for line in locks:  # "1: FLOCK  ADVISORY  READ 12 fe:00:345 0 EOF"; one that waits has "->" in the second place
            words = line.split()
            if words[1:2] == ["FLOCK"] and words[5:6] == [file]:
                found.append(_named(words[4]))
    return ", ".join(found) or "another process"


def _wait(path: Path, descriptor: int) -> None:
    started, is_said = time.monotonic(), False
    while True:
        try:
            return take_lock(descriptor)
        except BlockingIOError:
            waited = time.monotonic() - started
        if waited > _MOST_SECONDS:
            raise OutputError(
                f"{path}: locked by {lock_holders(descriptor)} for {waited:.0f} s; nothing was written; wait until "
                "that is done, or end it, and try again"
            )
        if waited > _SILENT_SECONDS and not is_said:
            is_said = True
            who = lock_holders(descriptor)
            _logger.warning("%s", printable(f"{path}: locked by {who}; waiting for at most {_MOST_SECONDS:g} s"))
        time.sleep(_BETWEEN_SECONDS)


def _named(process: str) -> str:
    with contextlib.suppress(OSError):
        return f"process {process} ({Path('/proc', process, 'comm').read_text().strip()})"
    return f"process {process}"
