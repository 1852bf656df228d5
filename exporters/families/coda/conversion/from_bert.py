"""BERT and the models of its layout: norms last, learned positions, kinds of token."""

from __future__ import annotations

from ....checkpoints.checkpoint import Checkpoint
from ...bert.architecture import names_in_files, read_bert
from .dense import DenseEncoder, activation_named, layer_weights, norm_eps, reader

_PARTS = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "ffn.up": "intermediate.dense",
    "ffn.down": "output.dense",
    "ffn_norm": "output.LayerNorm",
}


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
    read = reader(checkpoint, names_in_files(checkpoint, bert), bert.prefix)
    weights = layer_weights(
        read, [f"encoder.layer.{layer}" for layer in range(bert.layers)], _PARTS, ["weight", "bias"]
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
