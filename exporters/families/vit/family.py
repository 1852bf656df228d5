"""Hugging Face vision transformers: ViT and DeiT: base models, classifiers, masked image models.

Axes per layer: ``ffn`` (rows of ``mlp.fc1``, columns of ``mlp.fc2``) and ``heads`` (blocks of ``head_dim`` rows of
query, key and value, the same columns of the output projection). Images have no sequence: buckets differ in their batch
alone, while attention sees every patch and the tokens in front of them. A model without a head also answers with the
final state of [CLS], as ``embedding``: what image retrieval compares.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

from ....bucket import Bucket
from ....bundle.entries.tensor_spec import TensorSpec
from ....elastic import Axis, ElasticSpec, PrefixSlice, Submodel
from ....workload import Op, elementwise, linear, pre_norm_layer
from ...architecture import Architecture
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.config import read_nesting
from ...family import Family
from ...signature import Signature
from .architecture import VitArchitecture, names_in_files, read_vit

if TYPE_CHECKING:  # plans are made without torch
    import torch

_ATTENTION_NAME = re.compile(r"(?:.+\.)?layers\.(\d{1,9})\.attention")


def read(checkpoint: Checkpoint) -> Architecture:
    """The vision transformer in ``checkpoint`` with its head."""
    architecture = read_vit(checkpoint)
    signature = _signature(architecture)

    def load() -> torch.nn.Module:
        from .load import load_vit

        return load_vit(checkpoint, architecture, signature)

    return Architecture(
        spec=_spec(checkpoint, architecture),
        signature=signature,
        parameter_shapes=architecture.parameter_shapes,
        workload=partial(_workload, architecture),
        load=load,
        narrow=_narrow,
        names_in_files=names_in_files(checkpoint, architecture),
    )


FAMILY = Family("vit", ("vit", "deit"), read, reads_config_alone=True)


def _spec(checkpoint: Checkpoint, architecture: VitArchitecture) -> ElasticSpec:
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


def _signature(architecture: VitArchitecture) -> Signature:
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


def _workload(architecture: VitArchitecture, submodel: Submodel, bucket: Bucket) -> list[Op]:
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


def _narrow(module: torch.nn.Module, submodel: Submodel) -> None:
    for name, part in module.named_modules():
        if match := _ATTENTION_NAME.fullmatch(name):
            attention: Any = part
            attention.num_attention_heads = submodel[f"layers.{match[1]}.heads"]
