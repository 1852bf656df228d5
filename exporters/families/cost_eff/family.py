"""Multi-exit, slenderised BERT encoders (COST-EFF): every layer thin, an exit after some of them. See docs/cost-eff.md.

Axes: ``depth`` with the exits' layers as choices; per layer ``ffn`` and ``heads`` as in BERT, each at the width that
slenderising left; a layer without heads or without FFN channels has no such axis. The rank of a factorised embedding is
no axis: a lookup reads rows of ``[V, R]``, so a prefix of ``R`` is no contiguous part of the table, and the transpose
would make every lookup jump ``R`` times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ....bucket import Bucket
from ....bundle.entries.engine_entry import ExitsEntry, GateEntry, SegmentEntry
from ....bundle.entries.tensor_spec import TensorSpec
from ....bundle.manifest import Proof
from ....elastic import DEPTH, Axis, ElasticSpec, Submodel
from ....runtime.inputs.arrays import Arrays
from ....workload import Op, elementwise, linear, lookup, post_norm_layer
from ...architecture import Architecture
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.config import Nesting, read_nesting
from ...family import Family
from ...parts import Exits
from ...signature import text_signature
from .config import CostEffArchitecture, Sidecar, read_architecture, read_sidecar

if TYPE_CHECKING:  # plans are made without torch
    import torch


STATE_IN, STATE_OUT, LOGITS, ENTROPY = "state", "next_state", "logits", "entropy"
_LAYER_OR_EXIT_NAME = re.compile(r"encoder\.layer\.(?P<layer>\d{1,9})\.|exits\.(?P<exit>\d{1,9})\.")


def read(checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint``, with its exits where their answers have an entropy."""
    sidecar = read_sidecar(checkpoint.folder)
    architecture = read_architecture(checkpoint, sidecar)
    outputs, layers = answer_specs(architecture), architecture.exits.layers
    signature = text_signature(
        *(checkpoint, outputs, architecture.positions, architecture.vocabulary, architecture.pad, "token"),
        types=architecture.types,
    )

    def load() -> torch.nn.Module:
        from ...modules.layers import Answering
        from .loading import model_of, read_weights

        return Answering(model_of(architecture, read_weights(checkpoint, architecture)))

    def prove_load(feeds: Arrays) -> Iterator[Proof]:
        from .loading import prove_load

        return prove_load(checkpoint, architecture, feeds)

    return Architecture(
        spec=_spec(architecture, read_nesting(checkpoint, ("ffn", "heads"))),
        signature=signature,
        parameter_shapes=architecture.parameters.shapes,
        workload=partial(forward_ops, architecture),
        load=load,
        narrow=_narrow,
        exits=CostEffExits(architecture, sidecar, signature.inputs, layers) if architecture.has_entropy else None,
        prove_load=prove_load,
    )


def answer_specs(architecture: CostEffArchitecture) -> tuple[TensorSpec, ...]:
    """Outputs of an exit: logits, and their entropy where it is defined."""
    logits = TensorSpec(LOGITS, "float32", ("batch", architecture.exits.classes))
    return (logits, TensorSpec(ENTROPY, "float32", ("batch",))) if architecture.has_entropy else (logits,)


def _spec(architecture: CostEffArchitecture, nesting: Nesting) -> ElasticSpec:
    parameters, depth = architecture.parameters, len(architecture.layers)
    min_depth = {
        name: int(placed["exit"]) if placed["exit"] else int(placed["layer"]) + 1
        for name in parameters.shapes
        if (placed := _LAYER_OR_EXIT_NAME.match(name))
    }
    return ElasticSpec(
        (Axis(DEPTH, depth, architecture.exits.layers), *parameters.axes),
        tuple(parameters.slices),
        nesting.nested,
        depth=depth,
        min_depth=min_depth,
        granularities=nesting.granularities,
    )


def _narrow(module: torch.nn.Module, submodel: Submodel) -> None:
    from .model import inner_model

    model = inner_model(module)
    assert submodel.depth is not None
    del model.encoder.layer[submodel.depth :]
    for layer in [name for name in model.exits if int(name) > submodel.depth]:
        del model.exits[layer]


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
        from .model import FirstSegment, LaterSegment, inner_model

        first, last = self._span(segment)
        passes_on = segment < len(self._layers) - 1
        kind = LaterSegment if segment else FirstSegment
        return kind(inner_model(module), first, last, passes_on).eval()

    def every_exit(self, module: torch.nn.Module) -> torch.nn.Module:
        from .model import EveryExit, inner_model

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


def forward_ops(architecture: CostEffArchitecture, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """One pass through ``submodel``, to its depth and with each of its exits computed, as published costs count it.

    A whole engine computes the last exit alone, which is less by a thousandth or so.
    """
    assert submodel.depth is not None
    depth = submodel.depth
    exits = [layer for layer in architecture.exits.layers if layer <= depth]
    return segment_ops(architecture, submodel, bucket, (0, depth), exits)


def segment_ops(
    architecture: CostEffArchitecture, submodel: Submodel, bucket: Bucket, span: tuple[int, int], exits: Sequence[int]
) -> list[Op]:
    """The layers behind the first of ``span`` up to its last, and ``exits``; the embeddings too if the first is 0."""
    first, last = span
    ops = _embedding_ops(architecture, bucket) if first == 0 else []
    for layer in range(first, last):
        ops += _layer_ops(architecture, submodel, bucket, layer)
    for layer in exits:
        ops += _exit_ops(architecture, bucket, layer)
    return ops


def _embedding_ops(architecture: CostEffArchitecture, bucket: Bucket) -> list[Op]:
    h, t = architecture.hidden, bucket.tokens
    word = architecture.rank or h
    ops = [lookup("embeddings", t * (word + 2 * h))]
    if architecture.rank:
        ops.append(linear("embeddings.projection", t, word, h, bias=False))
    return [*ops, elementwise("embeddings.norm", t * h, passes=4)]


def _layer_ops(architecture: CostEffArchitecture, submodel: Submodel, bucket: Bucket, layer: int) -> list[Op]:
    at, widths = f"layers.{layer}", architecture.layers[layer]
    heads = submodel[f"{at}.heads"] if widths.heads else 0
    width = submodel[f"{at}.ffn"] if widths.ffn else 0
    return post_norm_layer(at, bucket, architecture.hidden, heads, architecture.head_size, width)


def _exit_ops(architecture: CostEffArchitecture, bucket: Bucket, layer: int) -> list[Op]:
    h, rows, exits = architecture.hidden, bucket.batch, architecture.exits
    pooled = rows * h if exits.pool == "cls" else bucket.tokens * h
    ops = [
        elementwise(f"exits.{layer}.pool", pooled, passes=2),
        linear(f"exits.{layer}.classifier", rows, h, exits.classes),
    ]
    if architecture.has_entropy:
        ops.append(elementwise(f"exits.{layer}.entropy", rows * exits.classes, passes=8))
    return ops


FAMILY = Family("cost_eff", ("cost_eff",), read)
