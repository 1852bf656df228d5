"""Small vision models with random weights, as a user's folder would hold them: images 8 x 8, patches 4 x 4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# 2 layers, 2 heads of 8, FFN 32, hidden 16; five tokens.
TINY_VIT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 2,
}
CLASSES = 3


def save_tiny_vit(folder: Path, model_type: str = "vit", task: str = "Model", **overrides: Any) -> Path:
    """A Hugging Face ViT or DeiT of the class that ends in ``task``, whose outputs depend on every part."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(model_type, **{**TINY_VIT, "num_labels": CLASSES, **overrides})
    torch.manual_seed(0)
    model = getattr(transformers, {"vit": "ViT", "deit": "DeiT"}[model_type] + task)(config)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    """Overwrites keys of ``config.json``; None removes one."""
    path = folder / "config.json"
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    return folder


def cut_ffn(folder: Path, widths: list[int]) -> Path:
    """Makes a Hugging Face ViT one whose layers keep their first ``widths`` neurons, listed in ``config.json``."""
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        for layer, width in enumerate(widths):
            if f"layer.{layer}.intermediate.dense." in name:
                weights[name] = weights[name][:width].contiguous()
            elif f"layer.{layer}.output.dense.weight" in name:
                weights[name] = weights[name][:, :width].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return edit_config(folder, intermediate_size=widths)


def save_tiny_matvit(folder: Path, **overrides: Any) -> Path:
    """A MatViT that says it was trained nested, in FFNs and heads."""
    from nestforge.exporters.checkpoints.own_folder import save_model
    from nestforge.exporters.families.matformer.config import MatformerVitConfig
    from nestforge.exporters.families.matformer.model import MatformerViT

    settings = {**TINY_VIT, "num_labels": CLASSES, "activation": "gelu", "nested": True, "nested_heads": True}
    config = MatformerVitConfig(**{**settings, **overrides})
    torch.manual_seed(0)
    model = MatformerViT(config)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return save_model(model, config, folder)
