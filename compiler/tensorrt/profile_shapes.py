"""The optimisation profile of an engine: one static shape for each input whose graph leaves one open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...elastic import Bucket
from ...errors import BuildError
from ...runtime.bundle.manifest import TensorSpec

# How TensorRT writes a dimension that is not known.
_UNKNOWN_EXTENT = -1


def profile_shapes(
    where: str, parsed: Mapping[str, tuple[int, ...]], inputs: Sequence[TensorSpec], bucket: Bucket
) -> dict[str, tuple[int, ...]]:
    """Shapes by name for the inputs that need a profile: minimum, optimum and maximum at once.

    ``parsed`` has the inputs as TensorRT read them, with -1 where a dimension is open. Raises BuildError if they are
    not those of the manifest at ``bucket``.
    """
    wanted = {spec.name: spec.shape(bucket) for spec in inputs}
    fits = parsed.keys() == wanted.keys() and all(_fits(shape, wanted[name]) for name, shape in parsed.items())
    if not fits:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in parsed.items())
        raise BuildError(f"{where}: its graph takes {listed}; the manifest says {wanted}")
    return {name: wanted[name] for name, shape in parsed.items() if _UNKNOWN_EXTENT in shape}


def _fits(parsed: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(parsed) == len(wanted) and all(
        have in (_UNKNOWN_EXTENT, want) for have, want in zip(parsed, wanted, strict=True)
    )
