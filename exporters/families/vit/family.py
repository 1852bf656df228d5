"""Hugging Face vision transformers: ViT and DeiT: base models, classifiers, masked image models.

Axes per layer: ``ffn`` (rows of ``mlp.fc1``, columns of ``mlp.fc2``) and ``heads`` (blocks of ``head_dim`` rows of
query, key and value, the same columns of the output projection). Images have no sequence: buckets differ in their batch
alone, while attention sees every patch and the tokens in front of them. A model without a head also answers with the
final state of [CLS], as ``embedding``: what image retrieval compares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ....elastic import Axis, Bucket, ElasticSpec, PrefixSlice, Submodel
from ....runtime.bundle.manifest import TensorSpec
from ....workload import Op, elementwise, linear, pre_norm_layer
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.elastic_config import read_nesting
from ...family import Family, Signature
from .architecture import names_in_files, read_vit

if TYPE_CHECKING:
    import torch

_ATTENTION = re.compile(r"(?:.+\.)?layers\.(\d{1,9})\.attention")


class VitFamily(Family):
    name: ClassVar[str] = "vit"
    model_types: ClassVar[tuple[str, ...]] = ("vit", "deit")
    reads_config_alone: ClassVar[bool] = True

    def describe(self, checkpoint: Checkpoint) -> ElasticSpec:
        architecture = read_vit(checkpoint)
        axes, slices = [], []
        for layer, width in enumerate(architecture.widths):
            block = f"{architecture.prefix}layers.{layer}."
            ffn = Axis(f"layers.{layer}.ffn", width)
            heads = Axis(f"layers.{layer}.heads", architecture.heads)
            axes += [ffn, heads]
            slices += [
                PrefixSlice(f"{block}mlp.fc1.weight", 0, ffn.name),
                PrefixSlice(f"{block}mlp.fc1.bias", 0, ffn.name),
                PrefixSlice(f"{block}mlp.fc2.weight", 1, ffn.name),
                *(
                    PrefixSlice(f"{block}attention.{part}.{kind}", 0, heads.name, architecture.head_dim)
                    for part in ("q_proj", "k_proj", "v_proj")
                    for kind in (("weight", "bias") if architecture.qkv_bias else ("weight",))
                ),
                PrefixSlice(f"{block}attention.o_proj.weight", 1, heads.name, architecture.head_dim),
            ]
        nesting = read_nesting(checkpoint, ("ffn", "heads"))
        return ElasticSpec(
            tuple(axes),
            tuple(slices),
            nesting.nested,
            depth=len(architecture.widths),
            granularities=nesting.granularities,
        )

    def signature(self, checkpoint: Checkpoint) -> Signature:
        architecture = read_vit(checkpoint)
        # Rows do not see each other, so rows of zeros fill a batch up to its bucket.
        pixels = TensorSpec("pixel_values", "float32", ("batch", architecture.channels, *architecture.image), pad=0)
        if architecture.masked:
            mask = TensorSpec("bool_masked_pos", "int64", ("batch", architecture.patches), pad=0, high=2)
            return Signature((pixels, mask), (TensorSpec("reconstruction", "float32", pixels.dims),))
        if architecture.head is not None:
            classes = architecture.classes
            logits = TensorSpec("logits", "float32", ("batch", classes), role="classes" if classes > 1 else None)
            return Signature((pixels,), (logits,))
        hidden = architecture.hidden
        outputs = [TensorSpec("last_hidden_state", "float32", ("batch", architecture.tokens, hidden))]
        if architecture.pooled is not None:
            outputs.append(TensorSpec("pooler_output", "float32", ("batch", architecture.pooled)))
        outputs.append(TensorSpec("embedding", "float32", ("batch", hidden), role="embedding"))
        return Signature((pixels,), tuple(outputs))

    def workload(self, checkpoint: Checkpoint, submodel: Submodel, bucket: Bucket) -> list[Op]:
        architecture = read_vit(checkpoint)
        hidden, image = architecture.hidden, Bucket(bucket.batch, architecture.tokens)
        pixels = architecture.patch_numbers
        ops = [
            linear("embeddings.projection", bucket.batch * architecture.patches, pixels, hidden),
            elementwise("embeddings.positions", image.tokens * hidden, passes=5),
        ]
        for layer in range(len(architecture.widths)):
            at = f"layers.{layer}"
            heads, width = submodel[f"{at}.heads"], submodel[f"{at}.ffn"]
            ops += pre_norm_layer(at, image, hidden, heads, architecture.head_dim, width)
        ops.append(elementwise("norm", image.tokens * hidden, passes=4))
        if architecture.masked:
            return [*ops, linear("decoder", bucket.batch * architecture.patches, hidden, pixels)]
        ends = (("pooler", architecture.pooled), ("classifier", architecture.classes))
        return ops + [linear(name, bucket.batch, hidden, size) for name, size in ends if size]

    def parameter_shapes(self, checkpoint: Checkpoint) -> Mapping[str, tuple[int, ...]]:
        return read_vit(checkpoint).parameter_shapes

    def names_in_files(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        return names_in_files(checkpoint)

    def load(self, checkpoint: Checkpoint) -> torch.nn.Module:
        from .load import load_vit

        return load_vit(checkpoint, read_vit(checkpoint), self.signature(checkpoint))

    def narrow(self, module: torch.nn.Module, submodel: Submodel) -> None:
        for name, part in module.named_modules():
            if match := _ATTENTION.fullmatch(name):
                attention: Any = part
                attention.num_attention_heads = submodel[f"layers.{match[1]}.heads"]


FAMILY = VitFamily()
