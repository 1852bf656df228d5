"""Every transformers class that is read, as a small folder with random weights, whose tensors may be renamed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from nestforge.exporters.families.bert import LAYOUTS as ENCODERS
from nestforge.exporters.families.decoder_types import LAYOUTS as DECODERS
from nestforge.exporters.families.gpt2 import CLASSES as GPT2
from safetensors.torch import load_file, save_file
from support.gated_decoders import OWN as DECODER_KEYS
from support.gated_decoders import TINY as TINY_DECODER
from support.tiny_models import CLASSES, TINY_GPT2, TINY_VIT

_TINY_ENCODER = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
}
VISION = {
    "vit": ("ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling"),
    "deit": (
        "DeiTModel",
        "DeiTForImageClassification",
        "DeiTForImageClassificationWithTeacher",
        "DeiTForMaskedImageModeling",
    ),
}
ENCODER_CLASSES = [(kind, name) for kind, layout in ENCODERS.items() for name in layout.classes]
DECODER_CLASSES = [(kind, name) for kind, layout in DECODERS.items() for name in layout.classes]
DECODER_CLASSES += [("gpt2", name) for name in GPT2]
VISION_CLASSES = [(kind, name) for kind, names in VISION.items() for name in names]


def save_class(folder: Path, model_type: str, class_name: str, **overrides: Any) -> Path:
    """A folder of the class, whose answers depend on every parameter."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if model_type in VISION:
        keys: dict[str, Any] = {**TINY_VIT, "num_labels": CLASSES, "encoder_stride": 4}
    else:
        labels = 2 if class_name.endswith("QuestionAnswering") else 3
        keys = {**_TINY_ENCODER, **({"embedding_size": 8} if model_type == "electra" else {}), "num_labels": labels}
        if model_type in DECODERS:
            keys = {**TINY_DECODER, **DECODER_KEYS[model_type], "num_labels": labels}
        if model_type == "gpt2":
            keys = {**TINY_GPT2, "num_labels": labels}
    config = transformers.AutoConfig.for_model(model_type, **{**keys, **overrides})
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(config)
    for parameter in model.parameters():  # biases and norms start at constants; make every one matter
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def rename(folder: Path, new_name: Callable[[str], str]) -> Path:
    """The folder with other names for its tensors."""
    path = folder / "model.safetensors"
    save_file({new_name(name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    return folder
