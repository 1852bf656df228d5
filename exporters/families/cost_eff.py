"""Multi-exit, slenderised BERT encoders (COST-EFF): every layer thin, an exit after some of them. See docs/cost-eff.md.

Axes per layer: ``ffn`` and ``heads`` as in BERT, each at the width that slenderising left; a layer without heads or
without FFN channels has no such axis. The rank of a factorised embedding is no axis: a lookup reads rows of ``[V, R]``,
so a prefix of ``R`` is no contiguous part of the table, and the transpose would make every lookup jump ``R`` times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ...elastic import Axis, Bucket, ElasticSpec, PrefixSlice, Submodel
from ...errors import CheckpointError
from ...runtime.manifest import TensorSpec, TextEntry
from ...workload import Op
from ..checkpoint import Checkpoint
from ..cost_eff.architecture import Architecture, entropy_name, logits_name
from ..cost_eff.forward_ops import forward_ops
from ..cost_eff.read_architecture import read_architecture
from ..family import Family, Signature

if TYPE_CHECKING:
    import torch


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
            TensorSpec("attention_mask", "int64", tokens, pad=0, high=2),
        ]
        if architecture.types > 1:
            inputs.append(TensorSpec("token_type_ids", "int64", tokens, pad=0, high=architecture.types))
        outputs = []
        for layer in architecture.exits.layers:
            outputs.append(TensorSpec(logits_name(layer), "float32", ("batch", architecture.exits.classes)))
            if architecture.has_entropy:
                outputs.append(TensorSpec(entropy_name(layer), "float32", ("batch",)))
        text = None
        if (checkpoint.folder / "tokenizer.json").is_file():
            type_ids = "token_type_ids" if architecture.types > 1 else None
            text = TextEntry("tokenizer.json", "input_ids", "attention_mask", type_ids, None)
        return Signature(tuple(inputs), tuple(outputs), architecture.positions, "attention_mask", text)

    def workload(self, checkpoint: Checkpoint, submodel: Submodel, bucket: Bucket) -> list[Op]:
        return forward_ops(read_architecture(checkpoint), submodel, bucket)

    def parameter_shapes(self, checkpoint: Checkpoint) -> Mapping[str, tuple[int, ...]]:
        return read_architecture(checkpoint).parameter_shapes

    def load(self, checkpoint: Checkpoint) -> torch.nn.Module:
        import torch

        from ..cost_eff.model import CostEffModel, EveryExit
        from ..cost_eff.weights import read_weights

        architecture = read_architecture(checkpoint)
        with torch.device("meta"):
            model = CostEffModel(architecture)
        weights = read_weights(checkpoint, architecture, _spec(architecture, nested=False))
        model.load_state_dict(weights, assign=True)
        return EveryExit(model).eval().requires_grad_(False)


FAMILY = CostEffFamily()


def _spec(architecture: Architecture, nested: bool) -> ElasticSpec:
    axes, slices = [], []
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
    return ElasticSpec(tuple(axes), tuple(slices), nested, depth=len(architecture.layers))
