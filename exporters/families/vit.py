"""Hugging Face vision transformers: ViT and DeiT: base models, classifiers, masked image models.

Axes per layer: ``ffn`` (rows of ``mlp.fc1``, columns of ``mlp.fc2``) and ``heads`` (blocks of ``head_dim`` rows of
query, key and value, the same columns of the output projection). Images have no sequence: buckets differ in their batch
alone, while attention sees every patch and the tokens in front of them. A model without a head also answers with the
final state of [CLS], as ``embedding``: what image retrieval compares.

transformers 5 renamed the modules (``layers.0.attention.q_proj``) and kept the names in files
(``vit.encoder.layer.0.attention.attention.query``), which it maps while loading. Here parameters carry the module's
names, and either name is found in a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...bucket import Bucket
from ...bundle.entries.tensor_spec import Role, TensorSpec
from ...elastic import Submodel
from ...workload import Op, elementwise, linear, pre_norm_layer
from ..architecture import Architecture
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import MOST_LAYERS, read_classes, read_number, read_widths, refuse_unhonoured
from ..family import Family
from ..hugging_face.describe import describe
from ..hugging_face.interface import Loading
from ..hugging_face.tensors import Parameters, held_tensors
from ..signature import Signature

if TYPE_CHECKING:  # plans are made without torch
    import torch

# A convolution of one pixel, which makes the pixels of a patch.
_RECONSTRUCTION_HEAD = "decoder.0"
_CLASS_HEAD_BESIDE_TEACHER, _TEACHER_HEAD = "cls_classifier", "distillation_classifier"
# The classes that are read, by model type, each with its head; the first is the base model.
CLASSES: dict[str, dict[str, str | None]] = {
    "vit": {
        "ViTModel": None,
        "ViTForImageClassification": "classifier",
        "ViTForMaskedImageModeling": _RECONSTRUCTION_HEAD,
    },
    "deit": {
        "DeiTModel": None,
        "DeiTForImageClassification": "classifier",
        "DeiTForImageClassificationWithTeacher": _CLASS_HEAD_BESIDE_TEACHER,
        "DeiTForMaskedImageModeling": _RECONSTRUCTION_HEAD,
    },
}
# Tokens in front of the patches: [CLS], and in DeiT the distillation token.
_FRONT_TOKENS = {"vit": ("cls_token",), "deit": ("cls_token", "distillation_token")}
# Tensors for other classes than the one that config.json names.
_UNUSED_TENSOR = re.compile(
    r"(?:.+\.)?(?:pooler\..+|embeddings\.mask_token)|(?:(?:cls_|distillation_)?classifier|decoder\.0)\.(?:weight|bias)"
)
# From names in files to names of modules, below the name of the base model; in this order.
_RENAMED_PARTS = (
    ("encoder.layer.", "layers."),
    (".attention.attention.query.", ".attention.q_proj."),
    (".attention.attention.key.", ".attention.k_proj."),
    (".attention.attention.value.", ".attention.v_proj."),
    (".attention.output.dense.", ".attention.o_proj."),
    (".intermediate.dense.", ".mlp.fc1."),
    (".output.dense.", ".mlp.fc2."),
)


@dataclass(frozen=True)
class VitModel:
    """Settings that determine the graph. ``widths`` are FFN neurons by layer; sizes of image and patch are ``(H, W)``
    pixels.

    ``prefix`` stands before the names of the base model under a task head. ``head`` is the module that makes the
    ``classes`` logits, or pixels of the patches that are masked; ``pooled`` is the pooler's size. Either is None where
    the class has none.
    """

    model_type: str
    prefix: str
    hidden: int
    heads: int
    head_dim: int
    widths: tuple[int, ...]
    qkv_bias: bool
    channels: int
    image: tuple[int, int]
    patch: tuple[int, int]
    head: str | None
    classes: int
    pooled: int | None

    @property
    def patches(self) -> int:
        return (self.image[0] // self.patch[0]) * (self.image[1] // self.patch[1])

    @property
    def tokens(self) -> int:
        """Length of the sequence that attention sees: patches and the tokens in front of them."""
        return self.patches + len(_FRONT_TOKENS[self.model_type])

    @property
    def masked(self) -> bool:
        """Whether the class puts a learned token in the place of masked patches and answers with pixels."""
        return self.head == _RECONSTRUCTION_HEAD

    @property
    def patch_numbers(self) -> int:
        """Numbers of one patch, in all channels."""
        return self.channels * self.patch[0] * self.patch[1]

    @property
    def parameters(self) -> Parameters:
        """Every parameter of the module."""
        found, at, h, inner = Parameters(), self.prefix, self.hidden, self.heads * self.head_dim
        cls, *others = _FRONT_TOKENS[self.model_type]
        for token in (cls, *(["mask_token"] if self.masked else []), *others):
            found.add(f"{at}embeddings.{token}", 1, 1, h)
        found.add(f"{at}embeddings.position_embeddings", 1, self.tokens, h)
        found.add(f"{at}embeddings.patch_embeddings.projection.weight", h, self.channels, *self.patch)
        found.add(f"{at}embeddings.patch_embeddings.projection.bias", h)
        for number, width in enumerate(self.widths):
            layer, ffn = f"{at}layers.{number}", found.axis(f"layers.{number}.ffn", width)
            heads = found.axis(f"layers.{number}.heads", self.heads)
            for part in ("q_proj", "k_proj", "v_proj"):
                found.linear(f"{layer}.attention.{part}", h, inner, self.qkv_bias, rows=heads, unit=self.head_dim)
            found.linear(f"{layer}.attention.o_proj", inner, h, columns=heads, unit=self.head_dim)
            found.norm(f"{layer}.layernorm_before", h)
            found.norm(f"{layer}.layernorm_after", h)
            found.linear(f"{layer}.mlp.fc1", h, width, rows=ffn)
            found.linear(f"{layer}.mlp.fc2", width, h, columns=ffn)
        found.norm(f"{at}layernorm", h)
        if self.pooled is not None:
            found.linear(f"{at}pooler.dense", h, self.pooled)
        if self.masked:
            found.add(f"{self.head}.weight", self.patch_numbers, h, 1, 1)
            found.add(f"{self.head}.bias", self.patch_numbers)
        elif self.head is not None:
            for head in (self.head, *([_TEACHER_HEAD] if self.head == _CLASS_HEAD_BESIDE_TEACHER else [])):
                found.linear(head, h, self.classes)
        return found

    def names_in_files(self, checkpoint: Checkpoint) -> dict[str, str]:
        """The tensors of a folder by their parameters, as ``held_tensors`` finds them."""
        shapes = self.parameters.shapes
        return held_tensors(checkpoint, shapes, self.model_type, _UNUSED_TENSOR.fullmatch, _RENAMED_PARTS)


def read_vit(checkpoint: Checkpoint) -> VitModel:
    """The model in ``checkpoint``, whose weights may be absent altogether.

    Raises CheckpointError for what config.json lacks or gets wrong.
    """
    refuse_unhonoured(checkpoint)
    config, model_type = checkpoint.config, str(checkpoint.config["model_type"])
    head = CLASSES[model_type][checkpoint.class_among(CLASSES[model_type])]
    hidden, heads = read_number(checkpoint, "hidden_size"), read_number(checkpoint, "num_attention_heads")
    has_pooler = head is None and (
        not checkpoint.has_weights or any(name.endswith("pooler.dense.weight") for name in checkpoint.tensors)
    )
    image, patch = _pair(checkpoint, "image_size"), _pair(checkpoint, "patch_size")
    if patch[0] > image[0] or patch[1] > image[1]:
        raise checkpoint.misfit(f"patch_size: expected at most image_size {list(image)}, got {list(patch)}")
    if head == _RECONSTRUCTION_HEAD:
        _check_masked(checkpoint)
    return VitModel(
        model_type=model_type,
        prefix="" if head is None else f"{model_type}.",
        hidden=hidden,
        heads=heads,
        head_dim=read_number(checkpoint, "head_dim", default=hidden // heads),
        widths=read_widths(checkpoint, read_number(checkpoint, "num_hidden_layers", at_most=MOST_LAYERS)),
        qkv_bias=config.get("qkv_bias", True) is True,
        channels=read_number(checkpoint, "num_channels", default=3),
        image=image,
        patch=patch,
        head=head,
        classes=read_classes(checkpoint) if head is not None else 0,
        pooled=read_number(checkpoint, "pooler_output_size", default=hidden) if has_pooler else None,
    )


def _check_masked(checkpoint: Checkpoint) -> None:
    """The class puts patches together to a square, each as large as it was."""
    image, patch = checkpoint.config.get("image_size"), checkpoint.config.get("patch_size")
    stride = read_number(checkpoint, "encoder_stride", default=16)
    if stride != patch or type(image) is not int or image % stride:
        raise checkpoint.misfit(
            f"encoder_stride: expected patch_size, and image_size a multiple of it, each one number; got {stride}, "
            f"{patch!r:.80} and {image!r:.80}",
        )


def _pair(checkpoint: Checkpoint, key: str) -> tuple[int, int]:
    value: Any = checkpoint.config.get(key)
    sides = value if isinstance(value, list) else [value, value]
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise checkpoint.misfit(f"{key}: expected a number of pixels or [height, width], got {value!r:.80}")
    return sides[0], sides[1]


def read(checkpoint: Checkpoint) -> Architecture:
    """The vision transformer in ``checkpoint`` with its head."""
    model = read_vit(checkpoint)
    parameters = model.parameters
    loading = Loading(
        without_pooler=model.pooled is None,
        shapes=parameters.shapes,
        found=_class_embedding if model.head is None else None,
    )
    names = model.names_in_files(checkpoint)
    return describe(checkpoint, parameters, names, _signature(model), partial(_workload, model), loading)


FAMILY = Family("vit", tuple(CLASSES), read, reads_config_alone=True)


def _signature(model: VitModel) -> Signature:
    # Rows do not see each other, so rows of zeros fill a batch up to its bucket.
    pixels = TensorSpec("pixel_values", "float32", ("batch", model.channels, *model.image), pad=0)
    if model.masked:
        mask = TensorSpec("bool_masked_pos", "int64", ("batch", model.patches), pad=0, high=2)
        return Signature((pixels, mask), (TensorSpec("reconstruction", "float32", pixels.dims),))
    if model.head is not None:
        role: Role | None = "classes" if model.classes > 1 else None
        return Signature((pixels,), (TensorSpec("logits", "float32", ("batch", model.classes), role=role),))
    outputs = [TensorSpec("last_hidden_state", "float32", ("batch", model.tokens, model.hidden))]
    if model.pooled is not None:
        outputs.append(TensorSpec("pooler_output", "float32", ("batch", model.pooled)))
    outputs.append(TensorSpec("embedding", "float32", ("batch", model.hidden), role="embedding"))
    return Signature((pixels,), tuple(outputs))


def _workload(model: VitModel, submodel: Submodel, bucket: Bucket) -> list[Op]:
    hidden, image, pixels = model.hidden, Bucket(bucket.batch, model.tokens), model.patch_numbers
    ops = [
        linear("embeddings.projection", bucket.batch * model.patches, pixels, hidden),
        elementwise("embeddings.positions", image.tokens * hidden, passes=5),
    ]
    for layer in range(len(model.widths)):
        at = f"layers.{layer}"
        ops += pre_norm_layer(at, image, hidden, submodel[f"{at}.heads"], model.head_dim, submodel[f"{at}.ffn"])
    ops.append(elementwise("norm", image.tokens * hidden, passes=4))
    if model.masked:
        return [*ops, linear("decoder", bucket.batch * model.patches, hidden, pixels)]
    ends = (("pooler", model.pooled), ("classifier", model.classes))
    return ops + [linear(name, bucket.batch, hidden, size) for name, size in ends if size]


def _class_embedding(result: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``embedding`` [B, H]: the [CLS] token's state after the final norm."""
    return {"embedding": result["last_hidden_state"][:, 0]}
