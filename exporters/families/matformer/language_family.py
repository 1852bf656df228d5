"""MatLM, the nested decoder-only language model of MatFormer. See docs/matformer.md.

Axes per layer: ``ffn`` (rows of ``ffn.up``, columns of ``ffn.down``) and, where the configuration nests them, ``heads``
(blocks of ``head_dim`` rows of query, key and value, the same columns of ``attention.output``, and where positions are
a relative bias, its rows).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ....bundle.entries.generation_entry import CachedLayer
from ....bundle.entries.tensor_spec import TensorSpec
from ....bundle.manifest import TextEntry
from ...architecture import Architecture, is_table
from ...cached_form import CachedForm, KeptAxes
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import read_config
from ...family import Family
from ...signature import Signature
from .architecture.config import MatformerConfig
from .architecture.forward_ops import language_model_ops
from .architecture.language_presets import LANGUAGE
from .architecture.shapes import compare_weights, elastic_spec, language_model_shapes

if TYPE_CHECKING:  # plans are made without torch
    import torch


def read(checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint``, whose weights may be absent altogether."""
    config = read_config(checkpoint, MatformerConfig)
    shapes = language_model_shapes(config)
    if checkpoint.has_weights:
        compare_weights(checkpoint, config, shapes)

    def load() -> torch.nn.Module:
        from .folder import model_of
        from .model.answering import Answering

        return Answering(model_of(checkpoint, config))

    return Architecture(
        spec=elastic_spec(config, shapes),
        signature=_signature(checkpoint, config),
        parameter_shapes=shapes,
        workload=partial(language_model_ops, config),
        load=load,
        is_embedding=is_embedding,
        cached=_cached(config),
    )


FAMILY = Family(
    "matformer_lm",
    ("matformer_lm",),
    read,
    reads_config_alone=True,
    presets={name: config.to_json() for name, config in LANGUAGE.items()},
)


def _signature(checkpoint: Checkpoint, config: MatformerConfig) -> Signature:
    tokens = ("batch", "sequence")
    # No mask: attention is causal, so padding on the right changes nothing before it.
    ids = TensorSpec("input_ids", "int64", tokens, pad=0, high=config.vocab_size)
    logits = TensorSpec("logits", "float32", (*tokens, config.vocab_size), role="next_tokens")
    text = None
    if checkpoint.tokenizer_files:
        text = TextEntry("tokenizer.json", "input_ids", None, None, None)
    return Signature((ids,), (logits,), config.max_position_embeddings, text=text)


def _cached(config: MatformerConfig) -> CachedForm:
    def cached(module: torch.nn.Module) -> torch.nn.Module:
        from .model.generating import CachedLM

        return CachedLM(module.model).eval()

    def recorded(module: torch.nn.Module) -> torch.nn.Module:
        from .model.generating import RecordedLM

        return RecordedLM(module.model).eval()

    layers = (CachedLayer(config.num_attention_heads, config.head_dim),) * config.num_hidden_layers
    axes = tuple(KeptAxes(f"layers.{layer}.heads") for layer in range(len(layers))) if config.nested_heads else ()
    return CachedForm(config.vocab_size, config.max_position_embeddings, layers, cached, recorded, kept=axes)


def is_embedding(parameter: str, shape: tuple[int, ...]) -> bool:
    """The bias per token of the vocabulary counts with the table that it belongs to, as in the paper's figures."""
    return parameter == "lm_head.bias" or is_table(parameter, shape)
