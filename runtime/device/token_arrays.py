"""Keys and values in memory of a device: made, freed, and their tokens copied from one array to another.

All are float32 with four dimensions, one of which counts tokens: the third, or of the keys of prompts the fourth. What
is copied are the first tokens of every line of what lies before that dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from .device import Device, DeviceArray

TOKENS, TOKENS_OF_KEYS = 2, 3
_ITEM_BYTES = 4


def empty_tensors(shapes: Iterable[tuple[int, ...]], device: Device) -> tuple[DeviceArray, ...]:
    """Arrays of zeros: attention reads every place, and what is masked must be a number. Raises
    BundleIncompatibleError where the device has no memory for them; it keeps none then."""
    tensors: list[DeviceArray] = []
    try:
        with device.lock:
            for shape in shapes:
                line, lines = prod(shape[2:]) * _ITEM_BYTES, prod(shape[:2])
                tensors.append(DeviceArray(device.allocate(lines * line), "float32", shape))
                device.clear_rows(tensors[-1].address, line, line, lines)
    except BaseException:
        free_tensors(tensors, device)
        raise
    return tuple(tensors)


def free_tensors(tensors: Iterable[DeviceArray], device: Device) -> None:
    """Gives their memory back."""
    with device.lock:
        for tensor in tensors:
            device.free(tensor.address)


def copy_tokens(device: Device, target: DeviceArray, source: DeviceArray, tokens: int, dim: int = TOKENS) -> None:
    """Makes the first ``tokens`` of ``target`` those of ``source``, which differs in their number alone, dimension
    ``dim``."""
    item = prod(source.shape[dim + 1 :]) * _ITEM_BYTES
    if width := tokens * item:
        pitches = (target.shape[dim] * item, source.shape[dim] * item)
        device.copy_rows(target.address, pitches[0], source.address, pitches[1], width, prod(source.shape[:dim]))


def swap_rows(device: Device, tensors: Sequence[tuple[DeviceArray, int]], one: int, other: int, tokens: int) -> None:
    """Exchanges the first ``tokens`` of two rows of each of ``tensors``, whose tokens are the dimension beside it.
    Raises BundleIncompatibleError where the device has no memory for a row."""
    if not tokens:
        return
    with device.lock:
        shapes = [(1, *tensor.shape[1:dim], tokens, *tensor.shape[dim + 1 :]) for tensor, dim in tensors]
        between = device.allocate(max(map(prod, shapes)) * _ITEM_BYTES)
        try:
            for (tensor, dim), shape in zip(tensors, shapes, strict=True):
                first, second = tensor.rows(one, one + 1), tensor.rows(other, other + 1)
                kept = DeviceArray(between, tensor.dtype, shape)
                copy_tokens(device, kept, first, tokens, dim)
                copy_tokens(device, first, second, tokens, dim)
                copy_tokens(device, second, kept, tokens, dim)
            device.wait()  # where an interruption comes, it is still given back
        finally:
            device.free(between)
