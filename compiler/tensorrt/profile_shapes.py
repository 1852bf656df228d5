"""An optimisation profile of an engine, for what TensorRT read: shapes of each input whose graph leaves one open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...bundle.entries.tensor_spec import TensorSpec
from ...bundle.shape_profile import Shape, ShapeProfile
from ...errors import BuildError

# How TensorRT writes a dimension that is not known.
_UNKNOWN_EXTENT = -1


def profile_shapes(
    where: str, parsed: Mapping[str, Shape], inputs: Sequence[TensorSpec], profile: ShapeProfile
) -> dict[str, tuple[Shape, Shape, Shape]]:
    """Minimum, optimum and maximum by name for the inputs that need a profile; equal where the bucket is static.

    ``parsed`` has the inputs as TensorRT read them, with -1 where a dimension is open. Raises BuildError if they are
    not those of the manifest at the profile's bucket.
    """
    declared = {spec.name: spec.declared(profile.bucket) for spec in inputs}
    fits = parsed.keys() == declared.keys() and all(_fits(shape, declared[name]) for name, shape in parsed.items())
    if not fits:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in parsed.items())
        raise BuildError(f"{where}: its graph takes {listed}; the manifest says {declared}")
    return {spec.name: profile.shapes(spec) for spec in inputs if _UNKNOWN_EXTENT in parsed[spec.name]}


def _fits(parsed: Shape, declared: tuple[str | int, ...]) -> bool:
    """Whether every dimension that the manifest leaves free is open, and any other one is open or has its size."""
    return len(parsed) == len(declared) and all(
        have in (_UNKNOWN_EXTENT, want) for have, want in zip(parsed, declared, strict=True)
    )
