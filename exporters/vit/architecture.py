"""The shape of a Hugging Face ViT or DeiT, from config.json alone and held against the weights (no torch here).

transformers 5 renamed the modules (``layers.0.attention.q_proj``) and kept the names in files
(``vit.encoder.layer.0.attention.attention.query``), which it maps while loading. Here parameters carry the module's
names, and either name is found in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError
from ..checkpoint import Checkpoint
from ..elastic_config import read_widths

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
_MOST_LAYERS = 1024
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
    prefix = "" if task == "Model" else f"{model_type}."
    hidden, heads = _number(checkpoint, "hidden_size"), _number(checkpoint, "num_attention_heads")
    names = _names_in_file(checkpoint, model_type, prefix)
    head = _TASKS[task]
    has_pooler = task == "Model" and (checkpoint.missing is not None or "pooler.dense.weight" in names)
    image, patch = _pair(checkpoint, "image_size"), _pair(checkpoint, "patch_size")
    if patch[0] > image[0] or patch[1] > image[1]:
        raise _misfit(checkpoint, f"patch_size: expected at most image_size {list(image)}, got {list(patch)}")
    architecture = VitArchitecture(
        model_type=model_type,
        prefix=prefix,
        hidden=hidden,
        heads=heads,
        head_dim=_number(checkpoint, "head_dim", default=hidden // heads),
        widths=read_widths(checkpoint, _layers(checkpoint)),
        qkv_bias=config.get("qkv_bias", True) is True,
        channels=_number(checkpoint, "num_channels", default=3),
        image=image,
        patch=patch,
        head=head,
        classes=_classes(checkpoint) if head is not None else 0,
        pooled=_number(checkpoint, "pooler_output_size", default=hidden) if has_pooler else None,
    )
    if checkpoint.missing is None:
        _compare_with_headers(checkpoint, architecture.parameter_shapes, names)
    return architecture


def _names_in_file(checkpoint: Checkpoint, model_type: str, prefix: str) -> dict[str, str]:
    """The tensors of a folder by the names that the module gives its parameters."""
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


def _compare_with_headers(checkpoint: Checkpoint, expected: Mapping[str, Shape], names: Mapping[str, str]) -> None:
    for parameter, shape in expected.items():
        name = names.get(parameter)
        if name is None:
            raise CheckpointError(f"{checkpoint.folder}: tensor {parameter} is missing from the weights")
        found = checkpoint.tensors[name].shape
        if found != shape:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} has shape {list(found)}; expected {list(shape)} as "
                "config.json says"
            )


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
    """As transformers counts them: the labels that have names, else ``num_labels``, else two."""
    labels = checkpoint.config.get("id2label")
    return len(labels) if isinstance(labels, dict) and labels else _number(checkpoint, "num_labels", default=2)


def _layers(checkpoint: Checkpoint) -> int:
    layers = _number(checkpoint, "num_hidden_layers")
    if layers > _MOST_LAYERS:  # or an absurd number would be counted through
        raise _misfit(checkpoint, f"num_hidden_layers: expected at most {_MOST_LAYERS}, got {layers}")
    return layers


def _pair(checkpoint: Checkpoint, key: str) -> tuple[int, int]:
    value: Any = checkpoint.config.get(key)
    sides = value if isinstance(value, list) else [value, value]
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise _misfit(checkpoint, f"{key}: expected a number of pixels or [height, width], got {value!r:.80}")
    return sides[0], sides[1]


def _number(checkpoint: Checkpoint, key: str, default: int | None = None) -> int:
    value: Any = checkpoint.config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise _misfit(checkpoint, f"{key}: expected a whole number of at least 1, got {value!r:.80}")
    return value


def _misfit(checkpoint: Checkpoint, problem: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint.folder / 'config.json'}: {problem}")


def _linear(name: str, inputs: int, outputs: int, bias: bool = True) -> dict[str, Shape]:
    return {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if bias else {})}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
