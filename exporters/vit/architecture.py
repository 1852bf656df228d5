"""The shape of a Hugging Face ViT or DeiT, from config.json alone and held against the weights (no torch here).

transformers 5 renamed the modules (``layers.0.attention.q_proj``) and kept the names in files
(``vit.encoder.layer.0.attention.attention.query``), which it maps while loading. Here parameters carry the module's
names, and either name is found in a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError
from ..checkpoint import Checkpoint
from ..elastic_config import MOST_LAYERS, read_number, read_widths
from ..stored_tensors import compare_with_headers

Shape = tuple[int, ...]

# Supported endings of the class that config.json names, with the module that makes the logits.
_TASKS: dict[str, str | None] = {
    "Model": None,
    "ForImageClassification": "classifier",
    "ForImageClassificationWithTeacher": "cls_classifier",
}
_TEACHER = "distillation_classifier"
# Tokens in front of the patches: [CLS], and in DeiT the distillation token.
_TOKENS = {"vit": 1, "deit": 2}
# What folders carry for other classes than the one that config.json names.
_UNUSED = re.compile(r"(?:.+\.)?(?:pooler\..+|embeddings\.mask_token)|(?:cls_|distillation_)?classifier\..+")
# From names in files to names of modules, below the name of the base model; in this order.
_RENAMED = (
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
    ``classes`` logits; ``pooled`` is the pooler's size. Either is None where the class has none.
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
        return self.patches + _TOKENS[self.model_type]

    @property
    def parameter_shapes(self) -> dict[str, Shape]:
        """Every parameter of the module, by the module's names."""
        h, inner = self.hidden, self.heads * self.head_dim
        shapes: dict[str, Shape] = {"embeddings.cls_token": (1, 1, h)}
        if self.model_type == "deit":
            shapes["embeddings.distillation_token"] = (1, 1, h)
        shapes["embeddings.position_embeddings"] = (1, self.tokens, h)
        shapes["embeddings.patch_embeddings.projection.weight"] = (h, self.channels, *self.patch)
        shapes["embeddings.patch_embeddings.projection.bias"] = (h,)
        for layer, width in enumerate(self.widths):
            at = f"layers.{layer}"
            for part in ("q_proj", "k_proj", "v_proj"):
                shapes |= _linear(f"{at}.attention.{part}", h, inner, bias=self.qkv_bias)
            shapes |= _linear(f"{at}.attention.o_proj", inner, h)
            shapes |= _norm(f"{at}.layernorm_before", h) | _norm(f"{at}.layernorm_after", h)
            shapes |= _linear(f"{at}.mlp.fc1", h, width) | _linear(f"{at}.mlp.fc2", width, h)
        shapes |= _norm("layernorm", h)
        if self.pooled is not None:
            shapes |= _linear("pooler.dense", h, self.pooled)
        shapes = {f"{self.prefix}{name}": shape for name, shape in shapes.items()}
        if self.head is not None:
            shapes |= _linear(self.head, h, self.classes)
            if self.head == _TASKS["ForImageClassificationWithTeacher"]:
                shapes |= _linear(_TEACHER, h, self.classes)
        return shapes


def read_vit(checkpoint: Checkpoint) -> VitArchitecture:
    """The architecture of the model in ``checkpoint``, whose weights may be absent altogether.

    Raises CheckpointError for what config.json lacks or gets wrong, and for a tensor that is missing or misfits.
    """
    config = checkpoint.config
    model_type, task = str(config["model_type"]), _task(checkpoint)
    hidden, heads = read_number(checkpoint, "hidden_size"), read_number(checkpoint, "num_attention_heads")
    names = names_in_files(checkpoint)
    head = _TASKS[task]
    has_pooler = task == "Model" and (not checkpoint.has_weights or "pooler.dense.weight" in names)
    image, patch = _pair(checkpoint, "image_size"), _pair(checkpoint, "patch_size")
    if patch[0] > image[0] or patch[1] > image[1]:
        raise _misfit(checkpoint, f"patch_size: expected at most image_size {list(image)}, got {list(patch)}")
    architecture = VitArchitecture(
        model_type=model_type,
        prefix=_prefix(checkpoint),
        hidden=hidden,
        heads=heads,
        head_dim=read_number(checkpoint, "head_dim", default=hidden // heads),
        widths=read_widths(checkpoint, read_number(checkpoint, "num_hidden_layers", at_most=MOST_LAYERS)),
        qkv_bias=config.get("qkv_bias", True) is True,
        channels=read_number(checkpoint, "num_channels", default=3),
        image=image,
        patch=patch,
        head=head,
        classes=_classes(checkpoint) if head is not None else 0,
        pooled=read_number(checkpoint, "pooler_output_size", default=hidden) if has_pooler else None,
    )
    if checkpoint.has_weights:
        compare_with_headers(checkpoint, architecture.parameter_shapes, names, _UNUSED.fullmatch)
    return architecture


def names_in_files(checkpoint: Checkpoint) -> dict[str, str]:
    """Every tensor of the folder, by the name that the module gives the parameter."""
    model_type, prefix = checkpoint.config["model_type"], _prefix(checkpoint)
    heads = tuple(f"{name}." for name in (*filter(None, _TASKS.values()), _TEACHER))
    found = {}
    for name in checkpoint.tensors:
        if name.startswith(heads):
            found[name] = name
            continue
        base = name.removeprefix(f"{model_type}.")
        for in_file, in_module in _RENAMED:
            base = base.replace(in_file, in_module)
        found[f"{prefix}{base}"] = name
    return found


def _prefix(checkpoint: Checkpoint) -> str:
    """What stands before the base model's names: nothing where it is the whole model."""
    return "" if _task(checkpoint) == "Model" else f"{checkpoint.config['model_type']}."


def _task(checkpoint: Checkpoint) -> str:
    architecture = checkpoint.architecture or "Model"
    task = next((name for name in _TASKS if architecture.endswith(name)), None)
    if task is None:
        raise _misfit(
            checkpoint,
            f"architecture {architecture!r:.80} is not supported; the vit family reads classes that end in "
            f"{', '.join(_TASKS)}",
        )
    return task


def _classes(checkpoint: Checkpoint) -> int:
    """As transformers counts them: ``num_labels``, else the labels that have names, else two."""
    labels = checkpoint.config.get("id2label")
    return read_number(checkpoint, "num_labels", default=len(labels) if isinstance(labels, dict) else 2)


def _pair(checkpoint: Checkpoint, key: str) -> tuple[int, int]:
    value: Any = checkpoint.config.get(key)
    sides = value if isinstance(value, list) else [value, value]
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise _misfit(checkpoint, f"{key}: expected a number of pixels or [height, width], got {value!r:.80}")
    return sides[0], sides[1]


def _misfit(checkpoint: Checkpoint, problem: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint.folder / 'config.json'}: {problem}")


def _linear(name: str, inputs: int, outputs: int, bias: bool = True) -> dict[str, Shape]:
    return {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if bias else {})}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
