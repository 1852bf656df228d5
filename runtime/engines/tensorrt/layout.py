"""Whether a plan is the engine that the manifest describes: a pure decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...device.layout import Layout

# Names of TensorRT's data types, by those of the manifest. Its own table for numpy knows no narrow types and raises.
DTYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "int64": "INT64",
    "int32": "INT32",
    "int8": "INT8",
    "uint8": "UINT8",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class PlanTensor:
    """One input or output as a plan states it; ``dtype`` is TensorRT's name, ``shape`` has -1 where it is open."""

    name: str
    is_input: bool
    dtype: str
    shape: tuple[int, ...]
    on_device: bool


def plan_problem(layout: Layout, found: Sequence[PlanTensor]) -> str | None:
    """Why a plan with these inputs and outputs is not the manifest's engine, or None."""
    for kind, is_input, slots in (("inputs", True, layout.inputs), ("outputs", False, layout.outputs)):
        have = {t.name: (t.dtype, t.shape) for t in found if t.is_input is is_input}
        want = {slot.name: (DTYPES[slot.dtype], slot.shape) for slot in slots.values()}
        if have != want:
            return f"{kind} are {_listed(have)}, the manifest says {_listed(want)}"
    if host := [tensor.name for tensor in found if not tensor.on_device]:
        return f"{', '.join(host)}: read on the host as a shape; an engine of one static shape has no such input"
    return None


def _listed(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in tensors.items()) or "none"
