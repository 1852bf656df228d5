"""The encoder of T5 and T5 v1.1: norms first, relative positions, scores that are not scaled."""

from __future__ import annotations

from ....checkpoints.checkpoint import Checkpoint
from ....modules.relative_distance import RELATIVE_BUCKETS, RELATIVE_REACH
from ...t5.architecture import ENCODER, MOST_TOKENS, TABLE, class_name, names_in_files, read_t5
from .dense import DenseEncoder, activation_named, layer_weights, norm_eps, reader

_GATED = "gated-"
_PARTS = {
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


def from_t5(checkpoint: Checkpoint) -> DenseEncoder:
    """Of an encoder alone, or of a model that has a decoder too, which is not judged.

    Raises CheckpointError for what does not map.
    """
    t5 = read_t5(checkpoint, encoder_alone=True)
    read = reader(checkpoint, names_in_files(checkpoint, t5))
    reach = checkpoint.config.get("relative_attention_max_distance", RELATIVE_REACH)
    if (t5.buckets, reach) != (RELATIVE_BUCKETS, RELATIVE_REACH):
        raise checkpoint.misfit(
            f"relative_attention_num_buckets and relative_attention_max_distance: expected {RELATIVE_BUCKETS} and "
            f"{RELATIVE_REACH}, as every published T5 has them, got {t5.buckets} and {reach}"
        )
    weights = layer_weights(
        read,
        [f"encoder.block.{layer}" for layer in range(t5.layers)],
        {**_PARTS, **(_GATE_AND_UP if t5.gated else _UP)},
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
        "activation": _activation(checkpoint),
        "gated_ffn": t5.gated,
        "norm": "rms",
        "norm_eps": norm_eps(checkpoint, "layer_norm_epsilon", 1e-6),
        "position": "relative",
        "softmax_scale": 1.0,
    }
    return DenseEncoder(fields, weights, ("decoder",) if class_name(checkpoint) != ENCODER else ())


def _activation(checkpoint: Checkpoint) -> str:
    """As transformers reads ``feed_forward_proj``: ``gated-gelu`` means the tanh form."""
    kind = checkpoint.config.get("feed_forward_proj", "relu")
    named = "gelu_new" if kind == "gated-gelu" else kind.removeprefix(_GATED)
    stated = checkpoint.config.get("dense_act_fn", named)
    if stated != named:
        raise checkpoint.misfit(f"dense_act_fn: expected {named}, as feed_forward_proj {kind} says, got {stated!r:.80}")
    return activation_named(checkpoint, "feed_forward_proj", named)
