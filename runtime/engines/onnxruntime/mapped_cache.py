"""A private, hashed cache on this host of engines in ONNX Runtime's packed layout.

The packed layout is tied to this processor and this ONNX Runtime, which maps it without checking one byte: a changed
byte would change answers silently. So the folder is its owner's alone, and every file is hashed before each use.
The folder may be deleted at any time; an engine takes about twice the bytes of its weights. A new entry sweeps out
what an interrupted build left and what other versions of ONNX Runtime packed, which this one would not read.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.files import private_folder, stream_sha256
from ....bundle.open_bundle import Bundle
from ....errors import OutputError
from ....outside_file import parse_json
from ....profiles.probe_host import probe_host
from ....whole_file import folder_beside, remove_unfinished

# Part of the key: raised when engines are packed with other settings.
_PACKING_VERSION = 1
_ENGINE_NAME = "engine.onnx"
_WEIGHTS_FILE_NAME = "engine.bin"
_RECEIPT_NAME = "receipt.json"


def mapped_engine(bundle: Bundle, engine: EngineEntry, build: Callable[[Path, str], None]) -> Path:
    """``engine`` saved with its weights packed for this processor, by ``build(engine_path, weights_name)`` if missing.

    An entry whose bytes are not those of its receipt is built again. One is built from bytes that have the bundle's
    hashes, by which it is kept. Raises OutputError if the cache cannot be written or is not private, BundleCorruptError
    for other bytes.
    """
    with _clear_errors():
        folder = _entry(bundle, engine)
        if not _intact(folder):
            bundle.require_hashes(engine.file, *bundle.manifest.weight_names)
            _build(folder, build)
            _sweep(folder.parent)
    return folder / _ENGINE_NAME


def is_mapped(bundle: Bundle, engine: EngineEntry) -> bool:
    """Whether the cache has an entry for ``engine``; its bytes are not checked. Raises OutputError as above."""
    with _clear_errors():
        return _entry(bundle, engine).is_dir()


def drop_mapped(bundle: Bundle, engine: EngineEntry) -> None:
    """Removes the entry of ``engine``, if there is one; an engine that is open goes on. Raises OutputError as above."""
    with _clear_errors():
        shutil.rmtree(_entry(bundle, engine), ignore_errors=True)


@contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise OutputError(
            f"cache of mapped engines: {failure.strerror} ({failure.filename or 'no file named'}); free some space, "
            "set XDG_CACHE_HOME to another folder, or use `residency='packed'` or `residency='shared'`"
        ) from failure


def _entry(bundle: Bundle, engine: EngineEntry) -> Path:
    """Folder ``VERSION-HASH``: of ONNX Runtime, and of everything that the packed bytes follow from."""
    files = {entry.path: entry.sha256 for entry in bundle.manifest.files}
    key = [_PACKING_VERSION, files[engine.file], bundle.manifest.weights_sha256 or "", _processor()]
    return private_folder("mapped") / f"{_version()}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()}"


def _version() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)


def _sweep(root: Path) -> None:
    """Removes what no process of this ONNX Runtime will read; engines that are open keep their mapped bytes."""
    remove_unfinished(root)
    for folder in root.iterdir():
        if not folder.name.startswith((".", f"{_version()}-")):
            shutil.rmtree(folder, ignore_errors=True)


def _intact(folder: Path) -> bool:
    """Whether every byte is still the one that was saved."""
    try:
        receipt = parse_json((folder / _RECEIPT_NAME).read_bytes())
        return isinstance(receipt, dict) and receipt == _hashes(folder)
    except (FileNotFoundError, ValueError):
        return False


def _hashes(folder: Path) -> dict[str, str]:
    hashes = {}
    for path in sorted(folder.iterdir()):
        if path.name != _RECEIPT_NAME:
            with path.open("rb") as file:
                hashes[path.name] = stream_sha256(file)
    return hashes


def _build(folder: Path, build: Callable[[Path, str], None]) -> None:
    with folder_beside(folder.parent) as fresh:
        build(fresh / _ENGINE_NAME, _WEIGHTS_FILE_NAME)
        (fresh / _RECEIPT_NAME).write_text(json.dumps(_hashes(fresh)))
        # Another process may have been first; what it left may be in use, and is as good if it is whole.
        if not _intact(folder):
            shutil.rmtree(folder, ignore_errors=True)
            try:
                fresh.rename(folder)
            except OSError:
                if not _intact(folder):
                    raise


def _processor() -> str:
    """Identity of the packed layout: the processor and the instructions it offers."""
    facts = probe_host()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line.partition(":")[2].strip() for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{facts.cpu} {facts.architecture} {features}"
