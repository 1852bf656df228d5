"""Files of users and of other programs, read: each has an end and a bounded size, and none is waited for; their JSON;
and what lies at a path that was given in the place of another.

A link is followed; what a bundle holds is read by ``bundle/files.py``, which follows none.
"""

import json
import os
import re
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

# Size limit of a settings file; those of tokenizers with thousands of added tokens take megabytes.
_MAX_JSON_BYTES = 8 * 2**20
# Depth of lists and mappings within each other: data is walked later without running out of stack.
_MAX_DEPTH = 64
_TOO_DEEP = f"lists and mappings within more than {_MAX_DEPTH} others"
# By the file that marks a folder, the surest first.
_FOLDERS = {
    "manifest.json": "a bundle, which `nestforge run` and `nestforge inspect` take, and every command with BUNDLE",
    "adapter_config.json": "an adapter of PEFT; with the model that it was trained on: "
    "`nestforge compile MODEL --task NAME={path} --output my.bundle`",
    "config.json": "a model folder; `nestforge compile {path} --output my.bundle` makes a bundle of it",
    "modules.json": "a folder of sentence-transformers without config.json: its first module is no transformer, or "
    "lies in a folder of its own, as old versions saved it; SentenceTransformer({path!r}).save(NEW_FOLDER) writes the "
    "folder that compiles",
}
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# By what was requested: the file that marks it, what is said where no folder lies, and what follows that for an id of
# the Hub, and else.
_WANTED = {
    "model": (
        "config.json",
        "{path}: no such folder; expected config.json and model.safetensors in it; a model on the Hugging Face Hub is ",
        "given as `hub:{path}`",
        "given as `hub:OWNER/NAME`",
    ),
    "bundle": (
        "manifest.json",
        "bundle {path}: not a folder; expected one that `nestforge compile` wrote",
        "; of a model on the Hugging Face Hub `nestforge compile hub:{path} --output {name}.bundle` makes one",
        "",
    ),
}
_BUNDLE_FILES = ("manifest.json", "build.json")
_IN_MODEL = "a file of a model folder; give the folder: {folder}"
_SUFFIXES = {
    ".onnx": "an ONNX graph, and graphs are written, not read; `nestforge compile` takes the model's own folder "
    "(config.json and model.safetensors)",
    ".plan": "a TensorRT plan; `nestforge run` takes the bundle that it belongs to",
    ".engine": "a TensorRT plan; `nestforge build` makes those of a bundle",
    ".safetensors": _IN_MODEL,
    ".bin": "pickled weights, which are refused since loading them can run code",
    ".pt": "pickled weights, which are refused since loading them can run code",
    ".pth": "pickled weights, which are refused since loading them can run code",
    ".gguf": "a file of llama.cpp; `nestforge compile` takes a model folder (config.json and model.safetensors)",
}


def open_file(path: Path, error: Callable[[str], Exception]) -> BufferedReader:
    """Opens a file whose end is known. Raises ``error(message)`` for what cannot be read, and for folders, pipes and
    devices."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe is not waited for
    except (OSError, ValueError) as failure:  # a name with a null character is a ValueError
        raise error(f"{path}: cannot be read ({getattr(failure, 'strerror', None) or failure})") from failure
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(f"{path}: expected a file, not a folder, a pipe or a device")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, max_bytes: int, error: Callable[[str], Exception]) -> bytes:
    """The content of a file of at most ``max_bytes``. Raises ``error(message)`` as ``open_file``, and for more."""
    with open_file(path, error) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise error(f"{path}: {size} bytes, more than the {max_bytes} allowed")
        try:
            return file.read(size)
        except OSError as failure:
            raise error(f"{path}: cannot be read ({failure.strerror or failure})") from failure


def read_json(path: Path, error: Callable[[str], Exception], kind: type = dict) -> Any:
    """The JSON object of a small file of another program, or the list where ``kind`` is that. Raises ``error(message)``
    as ``read_file``, and for anything else."""
    try:
        data = parse_json(read_file(path, _MAX_JSON_BYTES, error), strict=False)
    except ValueError as failure:
        raise error(f"{path}: not JSON ({failure})") from failure
    if not isinstance(data, kind):
        raise error(f"{path}: expected a JSON {'list' if kind is list else 'object'}, got {type(data).__name__}")
    return data


def parse_json(raw: bytes | str, strict: bool = True) -> Any:
    """The plain data of a JSON text, in UTF-8. Raises ValueError for anything else and for data nested too deeply.

    ``strict`` refuses what Python's parser takes beside JSON, where one reader could understand another thing than the
    next: keys that stand twice, NaN and Infinity. Files of other programs may have them.
    """
    try:
        if strict:
            text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
            data = _STRICT.decode(text)
        else:
            data = json.loads(raw)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if not strict or text.count("[") + text.count("{") > _MAX_DEPTH:
        _check_depth(data)
    return data


def versioned_json(
    raw: bytes, version: int, where: str, mend: str, error: Callable[[str], Exception]
) -> dict[str, Any]:
    """The JSON object of a file of nestforge's own, of schema ``version``. Raises ``error(message)``, which ends with
    ``mend``, for anything else."""
    try:
        data = parse_json(raw)
    except ValueError as failure:
        raise error(f"{where}: not JSON ({failure}); {mend}") from failure
    stated = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(data, dict) or type(stated) is not int or stated != version:
        raise error(
            f"{where}: schema_version {str(stated)[:80]!r}, expected {version}; use the nestforge release that wrote "
            f"it, or {mend}"
        )
    return data


def _check_depth(data: object) -> None:
    level: list[Any] = [data] if isinstance(data, (dict, list)) else []
    for _ in range(_MAX_DEPTH):
        values = (item.values() if isinstance(item, dict) else item for item in level)
        level = [inner for items in values for inner in items if isinstance(inner, (dict, list))]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError(f"a key stands twice among {', '.join(key for key, _ in pairs)[:80]}")
    return table


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


_STRICT = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)


def folder_problem(wanted: Literal["model", "bundle"], path: Path) -> str | None:
    """Why nothing that is ``wanted`` lies at ``path``: what does, with the command that takes it, or that there is
    no folder, with the command that downloads one. None where there may be one."""
    marker, missing, of_hub, otherwise = _WANTED[wanted]
    is_folder = os.path.isdir(path)  # of a name that the system refuses, too
    if is_folder and os.path.lexists(path / marker):
        return None
    if kind := _what_it_is(path, is_folder):
        return f"{wanted} {path}: is {kind}"
    if is_folder:
        return None
    is_hub_id = _HUB_ID.fullmatch(str(path)) is not None and not os.path.exists(path.parent)
    return (missing + (of_hub if is_hub_id else otherwise)).format(path=path, name=path.name)


def _what_it_is(path: Path, is_folder: bool) -> str | None:
    """The kind of what lies at ``path`` and the command that takes it; None for an unknown kind, or for nothing."""
    if is_folder:
        kind = next((kind for name, kind in _FOLDERS.items() if os.path.isfile(path / name)), None)
    elif not os.path.isfile(path):
        return None
    elif path.name in _BUNDLE_FILES:
        kind = "a file of a bundle; give the folder: {folder}"
    else:
        kind = _IN_MODEL if path.name in _FOLDERS else _SUFFIXES.get(path.suffix.lower())
    return None if kind is None else kind.format(path=str(path), folder=path.parent)
