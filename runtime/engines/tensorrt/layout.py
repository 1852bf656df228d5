"""Whether a plan is the engine that the manifest describes: a pure decision."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ....bucket import Bucket
from ....bundle.entries.generation_entry import PAST, PRESENT
from ....bundle.entries.tensor_spec import TensorSpec
from ....bundle.shape_profile import UNKNOWN_EXTENT, Shape, ShapeProfile

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
    """One input or output as a plan states it; ``dtype`` is TensorRT's name, ``shape`` has -1 where it is open.

    ``ends`` are the smallest and the largest shape that each optimisation profile of the plan has for an open input.
    ``alias`` is the input whose memory an output shares.
    """

    name: str
    is_input: bool
    dtype: str
    shape: Shape
    on_device: bool
    ends: tuple[tuple[Shape, Shape], ...] = ()
    alias: str | None = None


def plan_problem(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    bucket: Bucket,
    profiles: Sequence[ShapeProfile],
    found: Sequence[PlanTensor],
) -> str | None:
    """Why a plan with the tensors ``found`` is not the manifest's engine at ``bucket``, whose optimisation ``profiles``
    are these, or None.

    An output of a range may be open where the manifest knows its size: its shape is compared again in each run.
    """
    for kind, is_input, specs in (("inputs", True, inputs), ("outputs", False, outputs)):
        have = {tensor.name: tensor for tensor in found if tensor.is_input is is_input}
        want = {spec.name: (DTYPES[spec.dtype], _declared(spec, bucket)) for spec in specs}
        opens = not is_input and not bucket.is_static
        if have.keys() != want.keys() or not all(_is(tensor, *want[name], opens) for name, tensor in have.items()):
            stated = {name: (tensor.dtype, tensor.shape) for name, tensor in have.items()}
            return f"{kind} are {_listed(stated)}, the manifest says {_listed(want)}"
    if host := [tensor.name for tensor in found if not tensor.on_device]:
        return f"{', '.join(host)}: read on the host as a shape; no engine of nestforge has such an input"
    for output in (tensor for tensor in found if not tensor.is_input):
        own = updated_input(output.name, {spec.name for spec in inputs})
        if output.alias != own:
            return f"{output.name}: shares the memory of {output.alias or 'no input'}, expected {own or 'none'}"
    ends = {tensor.name: tensor.ends for tensor in found if tensor.ends}
    for spec in inputs:
        if spec.name not in ends:
            continue
        if len(ends[spec.name]) != len(profiles):
            return f"{len(ends[spec.name])} optimisation profiles, expected {len(profiles)}"
        for profile, (least, most) in zip(profiles, ends[spec.name], strict=True):
            low, _, high = profile.shapes(spec)
            if (least, most) != (low, high):
                return (
                    f"{spec.name}: the plan takes {list(least)} to {list(most)}, the manifest's bucket "
                    f"{profile.bucket} says {list(low)} to {list(high)}"
                )
    return None


def updated_input(output: str, inputs: Collection[str]) -> str | None:
    """The one of ``inputs`` that an engine which keeps a cache updates in place to make ``output``, if it does."""
    kept = output.replace(PRESENT, PAST, 1)
    return kept if output.startswith(PRESENT) and kept in inputs else None


def _declared(spec: TensorSpec, bucket: Bucket) -> tuple[int, ...]:
    """The shape that a plan states, which has no names for free dimensions."""
    return tuple(UNKNOWN_EXTENT if isinstance(dim, str) else dim for dim in spec.declared(bucket))


def _is(tensor: PlanTensor, dtype: str, shape: tuple[int, ...], opens: bool) -> bool:
    """Whether ``tensor`` is of this type and shape, or, where it ``opens``, leaves dimensions of it unknown."""
    if tensor.dtype != dtype or len(tensor.shape) != len(shape):
        return False
    return all(
        have == want or (opens and have == UNKNOWN_EXTENT) for have, want in zip(tensor.shape, shape, strict=True)
    )


def _listed(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in tensors.items()) or "none"
