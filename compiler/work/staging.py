"""Where a job works until it may publish: ``OUTPUT.partial``, whose folder ``output`` becomes ``OUTPUT`` at the end.

An interrupted job leaves its staging folder; the same command finds it by its key and goes on, wherever it was stopped:
while it works, between any two steps of publishing, or while it removes what is no longer needed. So does one whose
disk is full, once there is room; one that failed otherwise leaves nothing. Each result is written beside and renamed,
so what exists is whole.
"""

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeVar

from ...errors import OutputError
from ...strict import digest, structure, unstructure
from ...whole_file import folder_beside, lock_holders, put_in_place, take_lock

T = TypeVar("T")

_KEY_FILE = "key"
# Which files were published: the output may be moved away, and another put in its place, before the job goes on.
_PUBLISHED_FILE = "published.json"
_LOCK_FILE = ".lock"
_REPLACED_FOLDER = "replaced"
# safetensors writes into a file of the second form, which a killed process leaves.
_UNFINISHED_PATTERNS = ("*.writing", ".tmp*")
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE_ERRORS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EFBIG),
    *(errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP),
)


@dataclass(frozen=True)
class Stage:
    """The staging folders of one job: ``folder`` becomes the output, ``work`` is thrown away.

    ``is_published``: an earlier run published the output, and was stopped before it had ended. ``replaces``: an output
    that exists is replaced. ``pool`` is where the jobs of one model leave for each other what each would make alike.
    """

    folder: Path
    work: Path
    is_published: bool = False
    replaces: bool = False
    pool: Path | None = None

    def once(self, path: Path, produce: Callable[[Path], None], follows_from: object = None) -> Path:
        """``path``, produced now unless an earlier run finished it. With a ``pool`` it is, with what ``produce`` writes
        beside it, a link to that of any job that had the same name and all that the file ``follows_from``, beside the
        model."""
        if not path.exists():
            beside = path.with_name(path.name + ".writing")
            if self.pool is None or follows_from is None:
                produce(beside)
            else:
                made = self._pooled(self.pool, path.name, follows_from, produce)
                for file in made.iterdir():
                    link(file, beside if file.name == path.name else path.with_name(file.name))
            beside.rename(path)
        return path

    @staticmethod
    def _pooled(pool: Path, name: str, follows_from: object, produce: Callable[[Path], None]) -> Path:
        """The folder in ``pool`` with the file ``name``."""
        home = pool / name / digest(follows_from)
        if not home.exists():
            home.parent.mkdir(parents=True, exist_ok=True)
            with folder_beside(home.parent) as made:
                produce(made / name)
                try:
                    made.rename(home)
                except OSError:
                    if not home.exists():  # else another job was quicker
                        raise
        return home

    def memo(self, key: str, kind: type[T], make: Callable[[], T], files: Sequence[str] = ()) -> T:
        """The result ``key``, a value of ``kind``: made now unless an earlier run kept it in ``work``.

        A result that has ``files`` in ``folder`` is made again where any of them is gone: the manifest's stage removes
        the engines that it leaves out.
        """
        path = self._kept(key)
        if not all((self.folder / file).exists() for file in files):
            path.unlink(missing_ok=True)
        self.once(path, lambda beside: write_synced(beside, _json(make())))
        return structure(kind, json.loads(path.read_bytes()), str(path), OutputError)

    def has(self, key: str) -> bool:
        """Whether an earlier run kept the result ``key``."""
        return self._kept(key).exists()

    def _kept(self, key: str) -> Path:
        return self.work / f"{key}.json"


def _json(value: object) -> bytes:
    return json.dumps(unstructure(value), sort_keys=True).encode()


def write_synced(path: Path, data: bytes | memoryview) -> None:
    """Writes a file and waits until it has reached the disk."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def link(source: Path, target: Path) -> None:
    """Makes ``target`` the same file as ``source``, or a copy where the file system has no hard links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@contextmanager
def staged(output: Path, key: str, replaced: Sequence[str] = (), pool: Path | None = None) -> Iterator[Stage]:
    """A stage beside ``output``, published when the block ends without an error, unless the block has done so itself.

    Raises OutputError if ``output`` exists, cannot be written, or another job works on it. A folder that has all the
    files ``replaced`` may exist: once the new one is whole it takes its place in one step. Where an earlier run of the
    same ``key`` made the output that exists, and did not end, the stage says so instead. ``pool`` as of Stage.
    """
    if not output.name:
        raise OutputError(f"output {str(output)!r}: expected the name of a folder to make")
    root = staging_folder(output)
    with _disk_errors(output, every=True):
        if replaced:
            _require_own(output, replaced)
        lock = _locked(root, output, bool(replaced))
    with lock:
        with _disk_errors(output, every=True):
            stage = replace(_prepared(root, output, key, bool(replaced)), pool=pool)
        try:
            with _disk_errors(output):
                yield stage
            if not stage.is_published:
                publish(stage, output)
        except Exception as failure:
            if not (_is_full(failure.__cause__) and _has_finished(stage)):
                _discard(root)
                raise
            raise OutputError(
                f"{failure}; make room, and the same command goes on where this one was, or remove {root} to give it up"
            ) from failure.__cause__
        with contextlib.suppress(OSError):  # the output is there, and that is what was requested
            _remove(root)


def publish(stage: Stage, output: Path) -> None:
    """Gives the stage's folder its name, in one step; nothing where that is done. Raises OutputError."""
    if not stage.folder.exists():
        return
    with _disk_errors(output, every=True):
        write_synced(stage.work / _PUBLISHED_FILE, _json(_written_files(stage.folder)))
        put_in_place(stage.folder, output, stage.work / _REPLACED_FOLDER if stage.replaces else None)


def is_resumable(output: Path) -> bool:
    """Whether a job for ``output`` was stopped after it had begun to work."""
    try:
        return (staging_folder(output) / "work" / _KEY_FILE).is_file()
    except (OSError, ValueError):
        return False


def staging_folder(output: Path) -> Path:
    """Where a job for ``output`` works."""
    return output.with_name(output.name + ".partial")


def _require_own(output: Path, replaced: Sequence[str]) -> None:
    """Raises OutputError for an output that is there and none that the command writes."""
    if not os.path.lexists(output):
        return
    if output.is_symlink():
        raise OutputError(f"{output}: is a link, and `overwrite` replaces no link; give the folder that it leads to")
    if missing := [name for name in replaced if not (output / name).is_file()]:
        raise OutputError(
            f"{output}: has no {' and no '.join(missing)}, and `overwrite` replaces no other folder; remove it yourself"
        )


def _locked(root: Path, output: Path, replaces: bool) -> IO[str]:
    """The lock of the staging folder, which is made if it is missing; an output that may not be replaced gets none."""
    if "\0" in str(output):
        raise OutputError(f"{output}: cannot be written (no name of a file has a null character)")
    if os.path.lexists(output) and not root.exists() and not replaces:
        raise _exists(output)
    if os.path.lexists(root) and not _is_staging(root):
        raise OutputError(f"{root}: not a folder that a compile left; remove it or choose another `output`")
    root.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(root / _LOCK_FILE, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            lock = stack.enter_context(os.fdopen(descriptor, "w"))
            take_lock(descriptor)
            held = os.path.samestat(os.fstat(descriptor), (root / _LOCK_FILE).lstat())
        except BlockingIOError:
            who = lock_holders(descriptor)
            raise OutputError(f"{root}: another compile is working on this output: {who}") from None
        except FileNotFoundError:  # it ended just now, and took its folder away
            held = False
        if not held:
            raise OutputError(f"{root}: another compile is working on this output")
        stack.pop_all()
    return lock


def _is_staging(root: Path) -> bool:
    """Whether clearing ``root`` cannot take a user's own files, and no other user made it."""
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != getattr(os, "geteuid", lambda: status.st_uid)():
        return False
    try:
        return stat.S_ISREG((root / _LOCK_FILE).lstat().st_mode)
    except FileNotFoundError:
        return not any(root.iterdir())


def _prepared(root: Path, output: Path, key: str, replaces: bool) -> Stage:
    """The stage of an earlier run with this key, or an empty one."""
    stage = Stage(root / "output", root / "work", replaces=replaces)
    known = stage.work / _KEY_FILE
    is_same = known.is_file() and known.read_text() == key
    if os.path.lexists(output):
        # It was published; then the stage is gone, or what was replaced stands in its place.
        if is_same and (replaces or not stage.folder.exists()) and _is_published(stage, output):
            return replace(stage, is_published=True)
        if not replaces:
            if not stage.folder.exists():
                _remove(root)
            raise _exists(output)
    if not (is_same and stage.folder.is_dir()):
        try:
            known.unlink(missing_ok=True)  # from here on nothing is taken for resumable
            _remove_all_but_the_lock(root)
            stage.folder.mkdir()
            stage.work.mkdir()
            write_synced(known, key.encode())
        except OSError:
            _discard(root)
            raise
    _remove_unfinished(stage)
    return stage


def _remove_unfinished(stage: Stage) -> None:
    for place in (stage.folder, stage.work):
        for pattern in _UNFINISHED_PATTERNS:
            for unfinished in place.rglob(pattern):
                unfinished.unlink()


def _has_finished(stage: Stage) -> bool:
    """Whether anything but the key is whole; the rest is removed."""
    with contextlib.suppress(OSError):
        _remove_unfinished(stage)
        places = (*stage.folder.rglob("*"), *stage.work.rglob("*"))
        return any(place.name != _KEY_FILE and not place.is_dir() for place in places)
    return False


def _written_files(folder: Path) -> dict[str, list[int]]:
    """Each file of ``folder`` by its path in it: which one it is, and when it was written. Renaming changes neither."""
    files = ((path, path.lstat()) for path in sorted(folder.rglob("*")) if not path.is_dir())
    return {str(path.relative_to(folder)): [now.st_ino, now.st_size, now.st_mtime_ns] for path, now in files}


def _is_published(stage: Stage, output: Path) -> bool:
    """Whether what was published is what stands at ``output``; plans may have come to it since."""
    record = stage.work / _PUBLISHED_FILE
    if not record.is_file() or output.is_symlink() or not output.is_dir():
        return False
    found = _written_files(output)
    return all(found.get(name) == state for name, state in json.loads(record.read_bytes()).items())


def _discard(root: Path) -> None:
    """Removes a staging folder with its work, as far as the system lets us."""
    with contextlib.suppress(OSError):
        (root / "work" / _KEY_FILE).unlink(missing_ok=True)  # half of it must not be taken for resumable
        _remove(root)


def _remove(root: Path) -> None:
    """Removes a staging folder; whatever is left of it, if that is interrupted, is known for one."""
    _remove_all_but_the_lock(root)
    (root / _LOCK_FILE).unlink()
    root.rmdir()


def _remove_all_but_the_lock(root: Path) -> None:
    work = root / "work"
    kept = {root / _LOCK_FILE, work, work / _KEY_FILE, work / _PUBLISHED_FILE}
    for entry in (*root.iterdir(), *(work.iterdir() if work.is_dir() else ())):
        if entry not in kept:
            _remove_entry(entry)
    if work.is_dir():
        shutil.rmtree(work)  # the key last: until then the same command knows what it had published


def _remove_entry(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _exists(output: Path) -> OutputError:
    return OutputError(f"{output}: exists already; choose another `output` or `overwrite=True`")


def _is_full(failure: BaseException | None) -> bool:
    return isinstance(failure, OSError) and failure.errno in _DISK_FULL_ERRORS


@contextmanager
def _disk_errors(output: Path, every: bool = False) -> Iterator[None]:
    """Turns what the disk of ``output`` refuses into OutputError, and with ``every`` any other error of the system."""
    try:
        yield
    except OSError as failure:
        if _is_full(failure):
            published = "" if os.path.lexists(output) else "; nothing was published"
            raise OutputError(f"{output}: the disk is full{published}") from failure
        if every or (failure.errno in _UNWRITABLE_ERRORS and _is_below(failure.filename, output)):
            raise OutputError(f"{output}: cannot be written ({failure.strerror or failure})") from failure
        raise


def _is_below(name: object, output: Path) -> bool:
    """Whether the file ``name`` of an error, if it has one, lies in the output or its staging folder."""
    if name is None:
        return True
    path = Path(str(name)).absolute()
    return any(path.is_relative_to(place.absolute()) for place in (output, staging_folder(output)))
