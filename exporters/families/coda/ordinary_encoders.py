"""Ordinary encoders of transformers in the words of ``CodaEncoder``: BERT's layout, T5 and T5 v1.1, ViT and DeiT.

BERT: norms last, learned positions, kinds of token. T5: norms first, relative positions, scores that are not scaled.
ViT: norms first, learned positions, patches behind a class token (and of DeiT a distillation token).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import stored_tensor
from ...hugging_face.tensors import RELATIVE_BUCKETS, RELATIVE_REACH
from ..bert import read_bert
from ..t5 import ENCODER as T5_ENCODER
from ..t5 import MOST_TOKENS, TABLE, class_name, read_t5
from ..vit import read_vit
from .config import ImageInput

# transformers' names of the activations that layers may have.
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_BERT_PARTS = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "ffn.up": "intermediate.dense",
    "ffn.down": "output.dense",
    "ffn_norm": "output.LayerNorm",
}
_T5_PARTS = {
    "attention_norm": "layer.0.layer_norm",
    "attention.query": "layer.0.SelfAttention.q",
    "attention.key": "layer.0.SelfAttention.k",
    "attention.value": "layer.0.SelfAttention.v",
    "attention.output": "layer.0.SelfAttention.o",
    "ffn_norm": "layer.1.layer_norm",
    "ffn.down": "layer.1.DenseReluDense.wo",
}
_UP = {"ffn.up": "layer.1.DenseReluDense.wi"}
_GATE_AND_UP = {"ffn.gate": "layer.1.DenseReluDense.wi_0", "ffn.up": "layer.1.DenseReluDense.wi_1"}
_GATED = "gated-"
_QUERY_KEY_VALUE = {
    "attention.query": "attention.q_proj",
    "attention.key": "attention.k_proj",
    "attention.value": "attention.v_proj",
}
_VIT_PARTS = {
    "attention_norm": "layernorm_before",
    "attention.output": "attention.o_proj",
    "ffn_norm": "layernorm_after",
    "ffn.up": "mlp.fc1",
    "ffn.down": "mlp.fc2",
}
_BOTH = ("weight", "bias")


@dataclass(frozen=True)
class DenseEncoder:
    """``fields`` of ``CodaConfig``, ``weights`` of ``CodaEncoder`` by its names in float32, and by name what the
    checkpoint has behind the encoder, which is ``left_out``."""

    fields: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]
    left_out: tuple[str, ...] = ()


def from_bert(checkpoint: Checkpoint) -> DenseEncoder:
    """The encoder, whatever its class has behind it. Raises CheckpointError for what does not map."""
    bert = read_bert(checkpoint)
    if bert.causal:
        raise checkpoint.misfit("is_decoder: a decoder's tokens cannot be routed; expected an encoder")
    if bert.embedding != bert.hidden:
        raise checkpoint.misfit(
            f"embedding_size: {bert.embedding} numbers of a token are projected to {bert.hidden}, which encoders with "
            "conditional adapters do not have; expected as many as hidden_size"
        )
    read = reader(checkpoint, bert.names_in_files(checkpoint), bert.prefix)
    weights = layer_weights(
        read, [f"encoder.layer.{layer}" for layer in range(bert.layers)], _BERT_PARTS, ["weight", "bias"]
    )
    weights |= {
        "embeddings.word.weight": read("embeddings.word_embeddings.weight"),
        # From where the first token's place stands.
        "embeddings.position.weight": read("embeddings.position_embeddings.weight")[bert.reserved :],
        "embeddings.norm.weight": read("embeddings.LayerNorm.weight"),
        "embeddings.norm.bias": read("embeddings.LayerNorm.bias"),
    }
    if bert.types:
        weights["embeddings.token_type.weight"] = read("embeddings.token_type_embeddings.weight")
    fields = {
        "hidden_size": bert.hidden,
        "num_hidden_layers": bert.layers,
        "num_attention_heads": bert.heads,
        "intermediate_size": bert.ffn,
        "vocab_size": bert.vocabulary,
        "max_position_embeddings": bert.positions,
        "type_vocab_size": bert.types,
        "activation": activation_named(checkpoint, "hidden_act", checkpoint.config.get("hidden_act", "gelu")),
        "gated_ffn": False,
        "norm": "layer",
        "norm_place": "after",
        "norm_eps": norm_eps(checkpoint, "layer_norm_eps", 1e-12),
        "position": "learned",
        "bias": True,
    }
    behind = {"pooler": bert.pooler, "head": bert.head is not None}
    return DenseEncoder(fields, weights, tuple(name for name, has in behind.items() if has))


def from_t5(checkpoint: Checkpoint) -> DenseEncoder:
    """The encoder of a folder: of an encoder alone, or of a model that has a decoder too, which is not judged.

    Raises CheckpointError for what does not map.
    """
    t5 = read_t5(checkpoint, encoder_alone=True)
    read = reader(checkpoint, t5.names_in_files(checkpoint))
    reach = checkpoint.config.get("relative_attention_max_distance", RELATIVE_REACH)
    if (t5.buckets, reach) != (RELATIVE_BUCKETS, RELATIVE_REACH):
        raise checkpoint.misfit(
            f"relative_attention_num_buckets and relative_attention_max_distance: expected {RELATIVE_BUCKETS} and "
            f"{RELATIVE_REACH}, as every published T5 has them, got {t5.buckets} and {reach}"
        )
    weights = layer_weights(
        read,
        [f"encoder.block.{layer}" for layer in range(t5.layers)],
        {**_T5_PARTS, **(_GATE_AND_UP if t5.gated else _UP)},
        ["weight"],
    )
    weights |= {
        "embeddings.word.weight": read(TABLE),
        "relative_bias.weight": read("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        "norm.weight": read("encoder.final_layer_norm.weight"),
    }
    fields = {
        "hidden_size": t5.hidden,
        "num_hidden_layers": t5.layers,
        "num_attention_heads": t5.heads,
        "head_dim": t5.head_dim,
        "intermediate_size": t5.ffn,
        "vocab_size": t5.vocabulary,
        "max_position_embeddings": MOST_TOKENS,
        "activation": _t5_activation(checkpoint),
        "gated_ffn": t5.gated,
        "norm": "rms",
        "norm_eps": norm_eps(checkpoint, "layer_norm_epsilon", 1e-6),
        "position": "relative",
        "softmax_scale": 1.0,
    }
    return DenseEncoder(fields, weights, ("decoder",) if class_name(checkpoint) != T5_ENCODER else ())


def _t5_activation(checkpoint: Checkpoint) -> str:
    """As transformers reads ``feed_forward_proj``: ``gated-gelu`` means the tanh form."""
    kind = checkpoint.config.get("feed_forward_proj", "relu")
    named = "gelu_new" if kind == "gated-gelu" else kind.removeprefix(_GATED)
    stated = checkpoint.config.get("dense_act_fn", named)
    if stated != named:
        raise checkpoint.misfit(f"dense_act_fn: expected {named}, as feed_forward_proj {kind} says, got {stated!r:.80}")
    return activation_named(checkpoint, "feed_forward_proj", named)


def from_vit(checkpoint: Checkpoint) -> DenseEncoder:
    """The encoder, whatever its class has behind it. Raises CheckpointError for what does not map."""
    vit = read_vit(checkpoint)
    if len(set(vit.widths)) > 1:
        raise checkpoint.misfit("intermediate_size: layers of different widths cannot be made conditional")
    read = reader(checkpoint, vit.names_in_files(checkpoint), vit.prefix)
    at = [f"layers.{layer}" for layer in range(len(vit.widths))]
    weights = layer_weights(read, at, _VIT_PARTS, _BOTH)
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


def reader(checkpoint: Checkpoint, names: Mapping[str, str], prefix: str = "") -> Callable[[str], torch.Tensor]:
    """Reads a parameter by the name below ``prefix`` that its module gives it; ``names`` are those in files."""
    return lambda parameter: stored_tensor(checkpoint, names[f"{prefix}{parameter}"])


def layer_weights(
    read: Callable[[str], torch.Tensor], at: Sequence[str], parts: Mapping[str, str], kinds: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Every layer's ``kinds`` (weight, bias) of ``parts``, from the name in a layer of ``CodaEncoder`` to that in a
    layer of the checkpoint, of which ``at`` lists where each begins."""
    return {
        f"layers.{layer}.{own}.{kind}": read(f"{start}.{theirs}.{kind}")
        for layer, start in enumerate(at)
        for own, theirs in parts.items()
        for kind in kinds
    }


def activation_named(checkpoint: Checkpoint, key: str, name: object) -> str:
    """The activation that transformers calls ``name``. Raises CheckpointError, which names ``key``, for another."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise checkpoint.misfit(f"{key}: {name!r:.80} is no activation of conditional layers; expected one of {known}")
    return _ACTIVATIONS[name]


def norm_eps(checkpoint: Checkpoint, key: str, default: float) -> float:
    """Epsilon of the norms, ``default`` where config.json does not have ``key``. Raises CheckpointError."""
    value: Any = checkpoint.config.get(key, default)
    if type(value) not in (int, float) or not 0 < value < 1:
        raise checkpoint.misfit(f"{key}: expected a number between 0 and 1, got {value!r:.80}")
    return float(value)
