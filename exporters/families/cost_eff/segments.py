"""A multi-exit model cut at its exits: names and shapes of every segment, its costs, and its modules in torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ....bucket import Bucket
from ....bundle.entries.exits_entry import ExitsEntry, GateEntry, SegmentEntry
from ....bundle.entries.tensor_spec import TensorSpec
from ....elastic import Submodel
from ....workload import Op
from ...parts import Exits
from .architecture import CostEffArchitecture
from .forward_ops import segment_ops
from .sidecar import Sidecar

if TYPE_CHECKING:  # plans are made without torch
    import torch

STATE_IN, STATE_OUT, LOGITS, ENTROPY = "state", "next_state", "logits", "entropy"


def answer_specs(architecture: CostEffArchitecture) -> tuple[TensorSpec, ...]:
    """What an exit returns: logits, and their entropy where it is defined."""
    logits = TensorSpec(LOGITS, "float32", ("batch", architecture.exits.classes))
    return (logits, TensorSpec(ENTROPY, "float32", ("batch",))) if architecture.has_entropy else (logits,)


class CostEffExits(Exits):
    """Cut at the exits after ``layers``, rising to the last."""

    def __init__(
        self, architecture: CostEffArchitecture, sidecar: Sidecar, inputs: Sequence[TensorSpec], layers: tuple[int, ...]
    ) -> None:
        self._architecture, self._sidecar, self._inputs = architecture, sidecar, inputs
        self._layers = layers
        self._entry = ExitsEntry(
            segments=tuple(self._segments()),
            classes=architecture.exits.classes,
            logits=LOGITS,
            entropy=ENTROPY,
            state_in=STATE_IN,
            state_out=STATE_OUT,
            mask="attention_mask",
            trims=architecture.exits.pool != "mean_with_padding",
            gate=self._gate(),
        )

    def cut_at(self, layers: tuple[int, ...]) -> CostEffExits:
        return CostEffExits(self._architecture, self._sidecar, self._inputs, layers)

    @property
    def entry(self) -> ExitsEntry:
        return self._entry

    def workload(self, submodel: Submodel, bucket: Bucket, segment: int) -> list[Op]:
        return segment_ops(
            self._architecture, submodel, bucket, self._span(segment), self._layers[segment : segment + 1]
        )

    def segment(self, module: torch.nn.Module, segment: int) -> torch.nn.Module:
        from .model import inner_model
        from .segment_modules import FirstSegment, LaterSegment

        first, last = self._span(segment)
        passes_on = segment < len(self._layers) - 1
        kind = LaterSegment if segment else FirstSegment
        return kind(inner_model(module), first, last, passes_on).eval()

    def every_exit(self, module: torch.nn.Module) -> torch.nn.Module:
        from .model import inner_model
        from .segment_modules import EveryExit

        model = inner_model(module)
        layers = [layer for layer in self._layers if layer <= model.depth]
        return EveryExit(model, layers, self._layers[-1]).eval()

    def _span(self, segment: int) -> tuple[int, int]:
        return (0, *self._layers)[segment], self._layers[segment]

    def _segments(self) -> Iterator[SegmentEntry]:
        mask = next(spec for spec in self._inputs if spec.name == "attention_mask")
        state = ("batch", "sequence", self._architecture.hidden)
        taken = tuple(self._inputs)
        for layer in self._layers:
            passed = (TensorSpec(STATE_OUT, "float32", state),) if layer != self._layers[-1] else ()
            yield SegmentEntry(f"to{layer}", layer, taken, (*passed, *answer_specs(self._architecture)))
            taken = (TensorSpec(STATE_IN, "float32", state), mask)

    def _gate(self) -> GateEntry | None:
        """The model's own thresholds, of the exits that are used."""
        sidecar = self._sidecar
        if sidecar.gate is None or sidecar.thresholds is None:
            return None
        thresholds = dict(zip(sidecar.exits.layers, sidecar.thresholds, strict=False))
        return GateEntry(sidecar.gate.compare, tuple(float(thresholds[layer]) for layer in self._layers[:-1]))
