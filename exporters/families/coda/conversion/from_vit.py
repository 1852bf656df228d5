"""ViT and DeiT: norms first, learned positions, patches behind a class token (and of DeiT a distillation token)."""

from __future__ import annotations

import torch

from ....checkpoints.checkpoint import Checkpoint
from ...vit.architecture import names_in_files, read_vit
from ..architecture.inputs import ImageInput
from .dense import DenseEncoder, activation_named, layer_weights, norm_eps, reader

_QUERY_KEY_VALUE = {
    "attention.query": "attention.q_proj",
    "attention.key": "attention.k_proj",
    "attention.value": "attention.v_proj",
}
_PARTS = {
    "attention_norm": "layernorm_before",
    "attention.output": "attention.o_proj",
    "ffn_norm": "layernorm_after",
    "ffn.up": "mlp.fc1",
    "ffn.down": "mlp.fc2",
}
_BOTH = ("weight", "bias")


def from_vit(checkpoint: Checkpoint) -> DenseEncoder:
    """The encoder, whatever its class has behind it. Raises CheckpointError for what does not map."""
    vit = read_vit(checkpoint)
    if len(set(vit.widths)) > 1:
        raise checkpoint.misfit("intermediate_size: layers of different widths cannot be made conditional")
    read = reader(checkpoint, names_in_files(checkpoint, vit), vit.prefix)
    at = [f"layers.{layer}" for layer in range(len(vit.widths))]
    weights = layer_weights(read, at, _PARTS, _BOTH)
    weights |= layer_weights(read, at, _QUERY_KEY_VALUE, _BOTH if vit.qkv_bias else ["weight"])
    if not vit.qkv_bias:  # the other linear layers have one, and one of zeros is none
        weights |= {
            f"{layer}.{part}.bias": torch.zeros(vit.heads * vit.head_dim) for layer in at for part in _QUERY_KEY_VALUE
        }
    front = ["cls_token", *(["distillation_token"] if vit.model_type == "deit" else [])]
    weights |= {
        "embeddings.patch.weight": read("embeddings.patch_embeddings.projection.weight"),
        "embeddings.patch.bias": read("embeddings.patch_embeddings.projection.bias"),
        "embeddings.front": torch.cat([read(f"embeddings.{token}")[0] for token in front]),
        "embeddings.position.weight": read("embeddings.position_embeddings")[0],
        "norm.weight": read("layernorm.weight"),
        "norm.bias": read("layernorm.bias"),
    }
    image = ImageInput(
        channels=vit.channels,
        height=vit.image[0],
        width=vit.image[1],
        patch_height=vit.patch[0],
        patch_width=vit.patch[1],
        front_tokens=len(front),
    )
    fields = {
        "hidden_size": vit.hidden,
        "num_hidden_layers": len(vit.widths),
        "num_attention_heads": vit.heads,
        "head_dim": vit.head_dim,
        "intermediate_size": vit.widths[0],
        "image": image,
        "activation": activation_named(checkpoint, "hidden_act", checkpoint.config.get("hidden_act", "gelu")),
        "gated_ffn": False,
        "norm": "layer",
        "norm_eps": norm_eps(checkpoint, "layer_norm_eps", 1e-12),
        "position": "learned",
        "bias": True,
    }
    behind = {"pooler": vit.pooled is not None, "head": vit.head is not None}
    return DenseEncoder(fields, weights, tuple(name for name, has in behind.items() if has))
