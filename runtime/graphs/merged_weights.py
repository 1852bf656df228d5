"""Weights of an engine with a task merged into them: what takes the place of the weight store's when it is opened.

``W + B A`` (LoRA, arXiv 2106.09685, section 4.1) is summed in float64 and rounded once; the scale is in ``B``. A slice
of the sum is the sum of the slices: rows of ``W`` go with rows of ``B``, of its transpose with those of ``A``'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ...bundle.entries.task_entry import LORA_A, LORA_B
from ...bundle.manifest import WEIGHTS_NAME
from ...bundle.merged_task import MergedTask
from ...bundle.open_bundle import Bundle
from ...bundle.regular_file import FETCH_AGAIN
from ...errors import BundleCorruptError
from ..inputs.arrays import Array
from .initializers import Initializer
from .weight_store import readable

_WEIGHT, _TRANSPOSED = ".weight", ".T"


def merged_weights(bundle: Bundle, initializers: Iterable[Initializer]) -> dict[str, Array]:
    """Of ``initializers``, those of one engine that lie in the weight store, the ones that the task in the bundle's
    weights changes, by name; none without one.

    Raises BundleCorruptError where the store cannot be read, or the engine has other shapes than the task.
    """
    task = bundle.merged
    if task is None or not task.arrays:
        return {}
    with bundle.held(WEIGHTS_NAME):
        path = bundle.file(WEIGHTS_NAME)
        return {one.name: array for one in initializers if (array := _merged(path, task, one)) is not None}


def _merged(path: Path, task: MergedTask, one: Initializer) -> Array | None:
    """One initializer with the first steps of what the task has of it."""
    own = task.arrays.get(one.name)
    if own is not None:
        return np.ascontiguousarray(_first(own, one))
    change = _change(task, one.name) if task.kind == "lora" else None
    if change is None:
        return None
    change = _first(change, one)
    with readable(path), path.open("rb") as file:
        file.seek(one.offset)
        base = np.fromfile(file, np.dtype("<f4"), one.bytes // 4).reshape(one.shape)
    found: Array = (base.astype(np.float64) + change).astype(np.float32)
    return found


def _first(array: np.ndarray, one: Initializer) -> np.ndarray:
    """The first steps of ``array``, as many as the initializer has. Raises BundleCorruptError for another shape."""
    found: np.ndarray = array[: one.shape[0]] if one.shape else array
    if (found.shape, one.dtype) != (one.shape, "float32"):
        raise BundleCorruptError(
            f"initializer {one.name:.80}: {one.dtype} {list(one.shape)}, the task has float32 {list(array.shape)} "
            f"there; {FETCH_AGAIN}"
        )
    return found


def _change(task: MergedTask, name: str) -> np.ndarray | None:
    """What a pair beside the weight ``name`` adds to it, in float64 and laid out as the weight is; None without one."""
    plain = name.removesuffix(_TRANSPOSED)
    module = plain.removesuffix(_WEIGHT)
    down, up = _laid_out(task, module + LORA_A), _laid_out(task, module + LORA_B)
    if plain == module or down is None or up is None:
        return None
    if down.ndim != 2 or up.ndim != 2 or len(down) != up.shape[1]:
        raise BundleCorruptError(f"the pair beside {module:.80} is of {list(down.shape)} and {list(up.shape)}")
    change: np.ndarray = down.T @ up.T if name != plain else up @ down
    return change


def _laid_out(task: MergedTask, name: str) -> np.ndarray | None:
    """A matrix of a pair in float64, ``A`` as [r, in] and ``B`` as [out, r]."""
    if name in task.arrays:
        return task.arrays[name].astype(np.float64)
    turned = task.arrays.get(name + _TRANSPOSED)
    return None if turned is None else turned.T.astype(np.float64)
