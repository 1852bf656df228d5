"""The shape of a Hugging Face ViT or DeiT, from config.json alone and held against the weights (no torch here).

transformers 5 renamed the modules (``layers.0.attention.q_proj``) and kept the names in files
(``vit.encoder.layer.0.attention.attention.query``), which it maps while loading. Here parameters carry the module's
names, and either name is found in a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ...checkpoints.checkpoint import Checkpoint, compare_with_headers
from ...checkpoints.config import MOST_LAYERS, read_classes, read_number, read_widths, refuse_unhonoured
from ...hugging_face.tensors import Shape, linear_shapes, norm_shapes, parameter_names

# A convolution of one pixel, which makes the pixels of a patch.
_RECONSTRUCTION_HEAD = "decoder.0"
_CLASS_HEAD_BESIDE_TEACHER, _TEACHER_HEAD = "cls_classifier", "distillation_classifier"
# The classes that are read, by model type, each with its head; the first is the base model.
_HEADS_BY_CLASS: dict[str, dict[str, str | None]] = {
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
_FRONT_TOKENS = {"vit": 1, "deit": 2}
# What folders carry for other classes than the one that config.json names.
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
class VitArchitecture:
    """What determines the graph. ``widths`` are FFN neurons by layer; sizes of image and patch are ``(H, W)`` pixels.

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
        return self.patches + _FRONT_TOKENS[self.model_type]

    @property
    def masked(self) -> bool:
        """Whether the class puts a learned token in the place of masked patches and answers with pixels."""
        return self.head == _RECONSTRUCTION_HEAD

    @property
    def patch_numbers(self) -> int:
        """Numbers of one patch, in all channels."""
        return self.channels * self.patch[0] * self.patch[1]

    @property
    def parameter_shapes(self) -> dict[str, Shape]:
        """Every parameter of the module, by the module's names."""
        h, inner = self.hidden, self.heads * self.head_dim
        shapes: dict[str, Shape] = {"embeddings.cls_token": (1, 1, h)}
        if self.masked:
            shapes["embeddings.mask_token"] = (1, 1, h)
        if self.model_type == "deit":
            shapes["embeddings.distillation_token"] = (1, 1, h)
        shapes["embeddings.position_embeddings"] = (1, self.tokens, h)
        shapes["embeddings.patch_embeddings.projection.weight"] = (h, self.channels, *self.patch)
        shapes["embeddings.patch_embeddings.projection.bias"] = (h,)
        for layer, width in enumerate(self.widths):
            at = f"layers.{layer}"
            for part in ("q_proj", "k_proj", "v_proj"):
                shapes |= linear_shapes(f"{at}.attention.{part}", h, inner, bias=self.qkv_bias)
            shapes |= linear_shapes(f"{at}.attention.o_proj", inner, h)
            shapes |= norm_shapes(f"{at}.layernorm_before", h) | norm_shapes(f"{at}.layernorm_after", h)
            shapes |= linear_shapes(f"{at}.mlp.fc1", h, width) | linear_shapes(f"{at}.mlp.fc2", width, h)
        shapes |= norm_shapes("layernorm", h)
        if self.pooled is not None:
            shapes |= linear_shapes("pooler.dense", h, self.pooled)
        shapes = {f"{self.prefix}{name}": shape for name, shape in shapes.items()}
        if self.masked:
            shapes |= {
                f"{self.head}.weight": (self.patch_numbers, h, 1, 1),
                f"{self.head}.bias": (self.patch_numbers,),
            }
        elif self.head is not None:
            shapes |= linear_shapes(self.head, h, self.classes)
            if self.head == _CLASS_HEAD_BESIDE_TEACHER:
                shapes |= linear_shapes(_TEACHER_HEAD, h, self.classes)
        return shapes


def read_vit(checkpoint: Checkpoint) -> VitArchitecture:
    """The architecture of the model in ``checkpoint``, whose weights may be absent altogether.

    Raises CheckpointError for what config.json lacks or gets wrong, and for a tensor that is missing or misfits.
    """
    refuse_unhonoured(checkpoint)
    config, head = checkpoint.config, _head(checkpoint)
    model_type = str(config["model_type"])
    hidden, heads = read_number(checkpoint, "hidden_size"), read_number(checkpoint, "num_attention_heads")
    has_pooler = head is None and (
        not checkpoint.has_weights or any(name.endswith("pooler.dense.weight") for name in checkpoint.tensors)
    )
    image, patch = _pair(checkpoint, "image_size"), _pair(checkpoint, "patch_size")
    if patch[0] > image[0] or patch[1] > image[1]:
        raise checkpoint.misfit(f"patch_size: expected at most image_size {list(image)}, got {list(patch)}")
    architecture = VitArchitecture(
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
    if architecture.masked:
        _check_masked(checkpoint)
    if checkpoint.has_weights:
        names = names_in_files(checkpoint, architecture)
        compare_with_headers(checkpoint, architecture.parameter_shapes, names, _UNUSED_TENSOR.fullmatch)
    return architecture


def names_in_files(checkpoint: Checkpoint, architecture: VitArchitecture) -> dict[str, str]:
    """Every tensor of the folder, by the name that the module gives the parameter."""
    return parameter_names(checkpoint, architecture.parameter_shapes, architecture.model_type, _RENAMED_PARTS)


def _head(checkpoint: Checkpoint) -> str | None:
    """The head of the class that config.json names; without a name it is the base model, as for transformers."""
    classes = _HEADS_BY_CLASS[checkpoint.config["model_type"]]
    name = checkpoint.architecture or next(iter(classes))
    if name not in classes:
        raise checkpoint.misfit(f"architecture {name!r:.80} is not supported; supported are {', '.join(classes)}")
    return classes[name]


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
