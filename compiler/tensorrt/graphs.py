"""Graphs of engines for TensorRT: what is asked of them before a device builds plans."""

from __future__ import annotations

import onnx

from ...errors import BuildError
from .float_sums import float_sums
from .operators import unsupported


def accepted(where: str, graph: bytes) -> bytes:
    """``graph`` as every release of TensorRT from 10.3 on takes it: an equal function, in operators that it has.

    Raises BuildError; see ``require_supported``.
    """
    model = onnx.ModelProto.FromString(graph)
    changed = float_sums(model)
    require_supported(where, model)
    return model.SerializeToString(deterministic=True) if changed else graph


def require_supported(where: str, graph: onnx.ModelProto, tensorrt: str | None = None) -> None:
    """Raises BuildError naming what TensorRT's parser would refuse in ``graph``; see ``unsupported``."""
    if problems := unsupported(graph, tensorrt):
        release = f"TensorRT {tensorrt}" if tensorrt else "TensorRT 10"
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise BuildError(f"{where}: {release} cannot build its graph: {'; '.join(problems[:3])}{more}")
