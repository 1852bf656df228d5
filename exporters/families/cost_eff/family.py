"""Multi-exit, slenderised BERT encoders (COST-EFF): every layer thin, an exit after some of them. See docs/cost-eff.md.

Axes: ``depth`` with the exits' layers as choices; per layer ``ffn`` and ``heads`` as in BERT, each at the width that
slenderising left; a layer without heads or without FFN channels has no such axis. The rank of a factorised embedding is
no axis: a lookup reads rows of ``[V, R]``, so a prefix of ``R`` is no contiguous part of the table, and the transpose
would make every lookup jump ``R`` times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from ....elastic import DEPTH, Axis, Bucket, ElasticSpec, PrefixSlice, Submodel
from ....errors import CheckpointError
from ....runtime.bundle.manifest import Proof, TensorSpec, TextEntry
from ....workload import Op
from ...checkpoints.checkpoint import Checkpoint
from ...exits import Exits, chosen_exits
from ...family import Family, Signature
from .architecture import Architecture
from .forward_ops import forward_ops
from .read_architecture import read_architecture
from .segments import CostEffExits, answer_specs
from .sidecar import read_sidecar

if TYPE_CHECKING:
    import numpy as np
    import torch

_PLACED = re.compile(r"encoder\.layer\.(?P<layer>\d{1,9})\.|exits\.(?P<exit>\d{1,9})\.")


class CostEffFamily(Family):
    name: ClassVar[str] = "cost_eff"
    model_types: ClassVar[tuple[str, ...]] = ("cost_eff",)

    def describe(self, checkpoint: Checkpoint) -> ElasticSpec:
        nested = checkpoint.config.get("nested", False)
        if type(nested) is not bool:
            raise CheckpointError(
                f"{checkpoint.folder / 'config.json'}: nested: expected true or false, got {nested!r:.80}"
            )
        return _spec(read_architecture(checkpoint), nested)

    def signature(self, checkpoint: Checkpoint) -> Signature:
        architecture = read_architecture(checkpoint)
        tokens = ("batch", "sequence")
        inputs = [
            TensorSpec("input_ids", "int64", tokens, pad=architecture.pad, high=architecture.vocabulary),
            TensorSpec("attention_mask", "int64", tokens, pad=0, high=2, row_needs="token"),
        ]
        if architecture.types > 1:
            inputs.append(TensorSpec("token_type_ids", "int64", tokens, pad=0, high=architecture.types))
        text = None
        if (checkpoint.folder / "tokenizer.json").is_file():
            type_ids = "token_type_ids" if architecture.types > 1 else None
            text = TextEntry("tokenizer.json", "input_ids", "attention_mask", type_ids, None)
        return Signature(tuple(inputs), answer_specs(architecture), architecture.positions, "attention_mask", text)

    def workload(self, checkpoint: Checkpoint, submodel: Submodel, bucket: Bucket) -> list[Op]:
        return forward_ops(read_architecture(checkpoint), submodel, bucket)

    def exits(self, checkpoint: Checkpoint, wanted: Sequence[int] | None) -> Exits | None:
        architecture = read_architecture(checkpoint)
        layers = chosen_exits(architecture.exits.layers, wanted)
        if not architecture.has_entropy or len(layers) == 1:
            return None
        return CostEffExits(architecture, read_sidecar(checkpoint.folder), self.signature(checkpoint).inputs, layers)

    def prove_load(self, checkpoint: Checkpoint, feeds: Mapping[str, np.ndarray]) -> Iterator[Proof]:
        from .prove_load import prove_factors, prove_kept

        architecture = read_architecture(checkpoint)
        stored = replace(architecture, layers=architecture.stored, kept={})
        specs = _spec(architecture, nested=False), _spec(stored, nested=False)
        yield from prove_kept(checkpoint, architecture, specs, feeds)
        yield from prove_factors(checkpoint, architecture, specs[0], feeds)

    def narrow(self, module: torch.nn.Module, submodel: Submodel) -> None:
        from .model import inner_model

        model = inner_model(module)
        assert submodel.depth is not None
        del model.encoder.layer[submodel.depth :]
        for layer in [name for name in model.exits if int(name) > submodel.depth]:
            del model.exits[layer]

    def parameter_shapes(self, checkpoint: Checkpoint) -> Mapping[str, tuple[int, ...]]:
        return read_architecture(checkpoint).parameter_shapes

    def load(self, checkpoint: Checkpoint) -> torch.nn.Module:
        import torch

        from .model import Answering, CostEffModel
        from .weights import read_weights

        architecture = read_architecture(checkpoint)
        with torch.device("meta"):
            model = CostEffModel(architecture)
        weights = read_weights(checkpoint, architecture, _spec(architecture, nested=False))
        model.load_state_dict(weights, assign=True)
        return Answering(model).eval().requires_grad_(False)


FAMILY = CostEffFamily()


def _spec(architecture: Architecture, nested: bool) -> ElasticSpec:
    axes = [Axis(DEPTH, len(architecture.layers), architecture.exits.layers)]
    slices = []
    min_depth = {}
    for name in architecture.parameter_shapes:
        if placed := _PLACED.match(name):
            min_depth[name] = int(placed["exit"]) if placed["exit"] else int(placed["layer"]) + 1
    for layer, widths in enumerate(architecture.layers):
        block = f"encoder.layer.{layer}"
        if widths.ffn:
            ffn = Axis(f"layers.{layer}.ffn", widths.ffn)
            axes.append(ffn)
            slices += [
                PrefixSlice(f"{block}.intermediate.dense.weight", 0, ffn.name),
                PrefixSlice(f"{block}.intermediate.dense.bias", 0, ffn.name),
                PrefixSlice(f"{block}.output.dense.weight", 1, ffn.name),
            ]
        if widths.heads:
            heads = Axis(f"layers.{layer}.heads", widths.heads)
            axes.append(heads)
            slices += [
                *(
                    PrefixSlice(f"{block}.attention.self.{part}.{kind}", 0, heads.name, architecture.head_size)
                    for part in ("query", "key", "value")
                    for kind in ("weight", "bias")
                ),
                PrefixSlice(f"{block}.attention.output.dense.weight", 1, heads.name, architecture.head_size),
            ]
    return ElasticSpec(tuple(axes), tuple(slices), nested, depth=len(architecture.layers), min_depth=min_depth)
