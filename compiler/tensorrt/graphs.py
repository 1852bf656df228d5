"""Graphs of engines for TensorRT: what is asked of them before a device builds plans."""

from __future__ import annotations

import onnx

from ...errors import BuildError
from .float_sums import float_sums
from .operators import unsupported
from .scatter_caches import scatter_caches
from .whole_clips import whole_clips

# The release whose parser takes scatters into a cache, and attention.
_OLDEST_WITH_CACHES = "10.15"


def accepted(where: str, graph: bytes, capacity: int | None = None) -> bytes:
    """``graph`` as every release of TensorRT from 10.3 on takes it: an equal function, in operators that it has. One
    that keeps a cache, of ``capacity`` tokens, is for releases from 10.15 on.

    Raises BuildError; see ``require_supported``.
    """
    model = onnx.ModelProto.FromString(graph)
    changed = float_sums(model) + whole_clips(model) > 0
    if capacity is not None:
        scatter_caches(where, model, capacity)
        changed = True
    require_supported(where, model, _OLDEST_WITH_CACHES if capacity is not None else None)
    return model.SerializeToString(deterministic=True) if changed else graph


def require_supported(where: str, graph: onnx.ModelProto, tensorrt: str | None = None) -> None:
    """Raises BuildError naming what TensorRT's parser would refuse in ``graph``; see ``unsupported``."""
    if problems := unsupported(graph, tensorrt):
        release = f"TensorRT {tensorrt}" if tensorrt else "TensorRT 10"
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise BuildError(f"{where}: {release} cannot build its graph: {'; '.join(problems[:3])}{more}")
