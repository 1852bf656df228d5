"""The files of a weight store: one, or several where it would pass a size; these are named as Hugging Face's shards,
so that each has its name before any of them is written."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

WEIGHTS_NAME = "weights.safetensors"
_SHARD = re.compile(r"weights-([0-9]{5})-of-([0-9]{5})\.safetensors")


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
