"""Files of a bundle and beside it: regular ones with their identity, sealed ones, and those of this user alone.

The build record, calibrations and lists of plans are written where they are used, after the manifest and one without
the other, so that no manifest can list them. Each vouches for itself: by its seal, the SHA-256 of its own content
as its last field (docs/bundle-format.md, section 2.11). Between a file and a seal elsewhere an interruption would leave
a bundle that does not open. Private folders hold what the runtime trusts without checking its meaning.
A weight store of several files is named as Hugging Face's shards, so that each has its name before any is written.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import BundleCorruptError, BundleFormatError, OutputError
from ..outside_file import read_file
from ..profiles.probe_host import cache_folder
from ..progress import Bytes, tell
from ..whole_file import remove_unfinished, write_whole

WEIGHTS_NAME = "weights.safetensors"
_SHARD = re.compile(r"weights-([0-9]{5})-of-([0-9]{5})\.safetensors")
FETCH_AGAIN = "fetch the bundle again, or compile it again"
SEAL = "seal"
_SEAL_PREFIX = f'"{SEAL}": "'.encode()
_SEAL_DIGITS = 64
_SEAL_SUFFIX = b'"\n}\n'
_KEY_BYTES, _MAX_KEY_BYTES = 32, 4096
# Names a key file in place of this host's own, so that the machines of one fleet accept each other's plans.
KEY_VARIABLE = "NESTFORGE_PLAN_KEY"


class FileIdentity(NamedTuple):
    """Which file it is, and in what state: another file at the same path has another number, and one that was
    written to another time (ns) or size.

    Who writes may set the time of writing back. ``changed_ns`` nobody sets; but it moves with the file's rights, owner
    and links too, so of a file where it alone differs only the bytes say whether it is the same.
    """

    device: int
    number: int
    size: int
    modified_ns: int
    changed_ns: int

    @staticmethod
    def of(status: os.stat_result) -> FileIdentity:
        """The identity that ``status`` states."""
        return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def may_have_bytes_of(self, other: FileIdentity) -> bool:
        """Whether the two differ in ``changed_ns`` at most."""
        return self._replace(changed_ns=other.changed_ns) == other


def identity_at(path: Path) -> FileIdentity | None:
    """The file at ``path``, or None where there is none; a link is a file of its own."""
    try:
        return FileIdentity.of(path.lstat())
    except OSError:
        return None


@contextmanager
def regular_file(path: Path) -> Iterator[tuple[io.BufferedReader, FileIdentity]]:
    """The open file and its identity. A link, a folder, a pipe or a device is refused, and none is waited for.

    Raises BundleFormatError or BundleCorruptError.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise BundleFormatError(f"{path}: expected a regular file, not a link or a folder; {FETCH_AGAIN}")
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise BundleCorruptError(f"{path}: missing; {FETCH_AGAIN}") from None
    except OSError as failure:
        raise BundleCorruptError(f"{path}: cannot be read ({failure.strerror}); {FETCH_AGAIN}") from failure
    with os.fdopen(descriptor, "rb") as file:
        yield file, FileIdentity.of(os.fstat(descriptor))


def stream_sha256(file: io.BufferedReader) -> str:
    """The hash of what is left of ``file``; ``hashlib.file_digest`` does the same from Python 3.11 on."""
    digest, block = hashlib.sha256(), memoryview(bytearray(2**18))
    first, size = file.tell(), os.fstat(file.fileno()).st_size
    while count := file.readinto(block):
        digest.update(block[:count])
        tell(Bytes(file.tell() - first), Bytes(size - first))
    return digest.hexdigest()


def to_json(data: Any) -> bytes:
    """JSON as every file of a bundle has it: sorted keys, one indent, a final newline."""
    text = json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    # Half of a surrogate pair, as Python reads names of files that are not UTF-8, becomes JSON's own escape of it.
    return text.encode(errors="backslashreplace")


def sealed_json(data: Mapping[str, Any]) -> bytes:
    """``data``, a JSON object of at least one field, as the bytes of a sealed file."""
    content = to_json(data).removesuffix(b"\n}\n") + b",\n " + _SEAL_PREFIX
    return content + hashlib.sha256(content).hexdigest().encode() + _SEAL_SUFFIX


def unsealed(raw: bytes, data: Mapping[str, Any], where: str, mend: str) -> dict[str, Any]:
    """``data``, which was read from ``raw``, without its seal. Raises BundleCorruptError unless that is right."""
    content, digits = (
        raw[: -_SEAL_DIGITS - len(_SEAL_SUFFIX)],
        raw[-_SEAL_DIGITS - len(_SEAL_SUFFIX) : -len(_SEAL_SUFFIX)],
    )
    if SEAL not in data or not content.endswith(_SEAL_PREFIX) or not raw.endswith(_SEAL_SUFFIX):
        raise BundleCorruptError(f"{where}: has no seal at its end, or was changed since it was sealed; {mend}")
    if hashlib.sha256(content).hexdigest().encode() != digits:
        raise BundleCorruptError(f"{where}: its seal is not that of its content; {mend}")
    return {key: value for key, value in data.items() if key != SEAL}


def private_folder(name: str) -> Path:
    """``name`` in nestforge's cache folder, made if missing. Raises OutputError if others may change it."""
    try:
        folder = cache_folder() / name
        folder.mkdir(mode=0o700, exist_ok=True)
        _require_private(folder)
    except OSError as failure:
        where = failure.filename or name
        raise OutputError(f"{where}: cannot be used as a cache ({failure.strerror})") from failure
    remove_unfinished(folder)
    return folder


def plan_key() -> bytes:
    """The secret by which this host recognises plans that it built: 32 random bytes, made at first use.

    Raises OutputError for a key that others may read or change, or that is too short to keep anything.
    """
    named = os.environ.get(KEY_VARIABLE, "")
    path = Path(named) if named else private_folder("tensorrt") / "plan-key"
    try:
        if not named and not path.exists():
            _make_key(path)
        _require_private(path)
        key = read_file(path, _MAX_KEY_BYTES, OutputError)
    except OSError as failure:
        raise OutputError(f"plan key {path}: cannot be read or made ({failure.strerror})") from failure
    if len(key) < _KEY_BYTES:
        raise OutputError(
            f"plan key {path}: {len(key)} bytes, expected at least {_KEY_BYTES}; remove it and build again"
        )
    return key


def _make_key(path: Path) -> None:
    key = secrets.token_bytes(_KEY_BYTES)
    try:
        write_whole(path, lambda stream: stream.write(key), "the plan key", new=True, mode=0o600)
    except OutputError:
        if not path.exists():  # else another process was first
            raise


def _require_private(path: Path) -> None:
    if hasattr(os, "getuid"):
        status = path.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077 or path.is_symlink():
            allowed = "700" if path.is_dir() else "600"
            raise OutputError(f"{path}: others may read or change it; make it yours alone (chmod {allowed})")


def weight_names(count: int) -> tuple[str, ...]:
    """The names of a store of ``count`` files, in order."""
    if count == 1:
        return (WEIGHTS_NAME,)
    return tuple(f"weights-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1))


def is_of_weights(name: str) -> bool:
    """Whether a file of a bundle is one of its weight store."""
    return name == WEIGHTS_NAME or _SHARD.fullmatch(name) is not None


def weights_in(folder: Path) -> tuple[Path, ...]:
    """The files of the store in a folder that no manifest lists yet, in order."""
    return tuple(sorted(path for path in folder.iterdir() if is_of_weights(path.name)))


def weight_problems(names: Sequence[str]) -> Iterable[str]:
    """Problems of the files of a store, which ``names`` are in order."""
    if names and tuple(names) != weight_names(len(names)):
        yield f"files of the weight store: {', '.join(names[:8])}; expected {WEIGHTS_NAME}, or each of -of-N once"


def hash_of_all(hashes: Sequence[str]) -> str | None:
    """The hash of a store by those of its files in order: that of its only one, else of all of them one behind the
    other, as hexadecimal digits."""
    if len(hashes) < 2:
        return hashes[0] if hashes else None
    return hashlib.sha256("".join(hashes).encode()).hexdigest()
