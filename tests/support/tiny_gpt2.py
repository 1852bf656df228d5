"""Small GPT-2 models, made with transformers and random weights, as a user's folder would hold them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

TINY_GPT2: dict[str, Any] = {
    "vocab_size": 48,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": 32,
    "n_positions": 40,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_gpt2(class_name: str = "GPT2LMHeadModel", **overrides: Any) -> Any:
    """A transformers module whose answers really depend on every parameter."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, class_name)(transformers.GPT2Config(**{**TINY_GPT2, **overrides}))
    for parameter in model.parameters():  # biases and norms start at constants; make every one matter
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval().requires_grad_(False)


def save_gpt2(folder: Path, class_name: str = "GPT2LMHeadModel", **overrides: Any) -> Path:
    """A folder with ``config.json`` and ``model.safetensors``."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    make_gpt2(class_name, **overrides).save_pretrained(folder)
    return folder


def narrowed_gpt2(wide: Any, widths: list[int]) -> Any:
    """Another module of the same class, whose FFNs are really made with the first neurons of the wide one's."""
    narrow = copy.deepcopy(wide)
    for layer, width in zip(narrow.base_model.h, widths, strict=True):
        up, down = layer.mlp.c_fc, layer.mlp.c_proj
        layer.mlp = type(layer.mlp)(width, narrow.config).eval()
        layer.mlp.c_fc.weight.data, layer.mlp.c_fc.bias.data = up.weight.data[:, :width], up.bias.data[:width]
        layer.mlp.c_proj.weight.data, layer.mlp.c_proj.bias.data = down.weight.data[:width], down.bias.data
    return narrow.requires_grad_(False)
