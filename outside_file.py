"""Files of users and of other programs, read: each has an end and a bounded size, and none is waited for; and what lies
at a path that was given in the place of another.

A link is followed; what a bundle holds is read by ``bundle/files.py``, which follows none.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path

# By the file that marks a folder, the surest first.
_FOLDERS = {
    "manifest.json": "a bundle, which `nestforge run` and `nestforge inspect` take, and every command with BUNDLE",
    "adapter_config.json": "an adapter of PEFT; with the model that it was trained on: "
    "`nestforge compile MODEL --task NAME={path} --output my.bundle`",
    "config.json": "a model folder; `nestforge compile {path} --output my.bundle` makes a bundle of it",
}
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
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


def what_it_is(path: Path) -> str | None:
    """The kind of what lies at ``path`` and the command that takes it; None for an unknown kind, or for nothing."""
    if os.path.isdir(path):
        kind = next((kind for name, kind in _FOLDERS.items() if os.path.isfile(path / name)), None)
    elif not os.path.isfile(path):
        return None
    elif path.name in _BUNDLE_FILES:
        kind = "a file of a bundle; give the folder: {folder}"
    else:
        kind = _IN_MODEL if path.name in _FOLDERS else _SUFFIXES.get(path.suffix.lower())
    return None if kind is None else kind.format(path=path, folder=path.parent)


def is_hub_id(path: Path) -> bool:
    """Whether ``path``, where nothing lies, looks like a model's id on the Hugging Face Hub: a path of two parts whose
    parent is not there either."""
    return _HUB_ID.fullmatch(str(path)) is not None and not os.path.exists(path.parent)
