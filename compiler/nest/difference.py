"""How far a submodel's pass is from the original's: what nested self-distillation makes small."""

from __future__ import annotations

import torch

from ...exporters.signature import Signature
from .watched import Pass

# Relative squares of vectors that are almost zero would be noise.
_MIN_SQUARED_NORM = 1e-6


def difference(signature: Signature, student: Pass, teacher: Pass, weights: torch.Tensor) -> torch.Tensor:
    """Mean relative squared error, a scalar: of the outputs, and of the hidden states after each block.

    The outputs that count are those with a sequence, token by token, and the text embedding; where a model has neither,
    all that it has. Every vector's squared error is divided by the square of the teacher's. ``weights`` float32
    ``[B, S]`` says which tokens count.
    """
    embedding = signature.text.embedding if signature.text else None
    wanted = [spec.name == embedding or "sequence" in spec.dims for spec in signature.outputs]
    total = torch.zeros(())
    for spec, counts, found, expected in zip(signature.outputs, wanted, student.outputs, teacher.outputs, strict=True):
        if counts or not any(wanted):
            total = total + _relative(found, expected, weights if "sequence" in spec.dims else None)
    # The states in between give every layer something of its own to reach, which no output alone does in few steps.
    for found, expected in zip(student.hidden, teacher.hidden, strict=True):
        total = total + _relative(found, expected, weights) / len(student.hidden)
    return total


def _relative(found: torch.Tensor, expected: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Of vectors ``[B, S, H]`` with weights ``[B, S]``, or ``[B, H]``, where all count."""
    errors = (found - expected).square().sum(-1) / expected.square().sum(-1).clamp(min=_MIN_SQUARED_NORM)
    return errors.mean() if weights is None else (errors * weights).sum() / weights.sum().clamp(min=1)
