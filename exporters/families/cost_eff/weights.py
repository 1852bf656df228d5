"""A checkpoint's tensors as the reference model's parameters: float32, finite, and sliced to what the sidecar keeps."""

from __future__ import annotations

import torch
from safetensors import safe_open

from ....elastic import ElasticSpec
from ...checkpoints.checkpoint import Checkpoint
from ...ranking import step_blocks
from .architecture import CostEffArchitecture


def read_weights(
    checkpoint: Checkpoint, architecture: CostEffArchitecture, spec: ElasticSpec
) -> dict[str, torch.Tensor]:
    """Every parameter by name, in float32. Kept heads and channels stay in ascending order.

    Raises CheckpointError if a value is not finite.
    """
    wanted: dict[str, list[str]] = {}
    for name in architecture.parameter_shapes:
        wanted.setdefault(checkpoint.tensors[name].file, []).append(name)
    weights: dict[str, torch.Tensor] = {}
    for file, names in wanted.items():
        with safe_open(checkpoint.folder / file, framework="pt") as tensors:
            for name in names:
                weights[name] = _sliced(tensors.get_tensor(name), name, architecture, spec).to(torch.float32)
                if not torch.isfinite(weights[name]).all():
                    raise checkpoint.not_finite(name)
    return weights


def _sliced(data: torch.Tensor, name: str, architecture: CostEffArchitecture, spec: ElasticSpec) -> torch.Tensor:
    for cut in spec.slices_of(name):
        if cut.axis in architecture.kept:
            kept = torch.tensor(architecture.kept[cut.axis])
            data = step_blocks(data, cut)[kept].flatten(0, 1).movedim(0, cut.dim).contiguous()
    return data
