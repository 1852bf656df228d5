"""The exits of a model whose requests may leave early, and the segments between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .tensor_spec import TensorSpec


@dataclass(frozen=True)
class SegmentEntry:
    """The layers between two exits, compiled as engines of their own; ``layer`` counts the layers that have run when
    its exit answers. A segment but the first takes the state that the one before returned."""

    name: str
    layer: int = field(metadata={"min": 1})
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class GateEntry:
    """When a row leaves early: ``entropy compare threshold``, in nats; a threshold for every exit but the last, which
    always answers. A negative one closes its exit."""

    compare: Literal["<", "<="]
    thresholds: tuple[float, ...]


@dataclass(frozen=True)
class ExitsEntry:
    """The exits of a multi-exit model and the segments between them, in order; ``gate`` is the model's own, if any.

    Every segment returns ``logits`` ``[B, classes]`` and ``entropy`` ``[B]`` (nats) of its exit, and all but the last
    the state ``state_out`` ``[B, S, H]`` that the next takes as ``state_in``. ``mask`` is the input that says which
    positions count. ``trims``: whether positions behind the longest row may be cut without changing an answer.
    """

    segments: tuple[SegmentEntry, ...]
    classes: int = field(metadata={"min": 2})
    logits: str
    entropy: str
    state_in: str
    state_out: str
    mask: str
    trims: bool
    gate: GateEntry | None = None

    @property
    def computed_from(self) -> dict[str, str]:
        """Outputs that are computed from another one."""
        return {self.entropy: self.logits}
