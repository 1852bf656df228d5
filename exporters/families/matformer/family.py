"""MatFormer: MatLM, a nested decoder-only language model, and MatViT, a nested vision transformer.

See docs/matformer.md.

Axes per layer: ``ffn`` (rows of ``ffn.up``, columns of ``ffn.down``) and, where the configuration nests them, ``heads``
(blocks of ``head_dim`` rows of query, key and value, the same columns of ``attention.output``, and where positions are
a relative bias, its rows). Images have no sequence: buckets differ in their batch alone, while attention sees every
patch and the class token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ....bundle.entries.generation_entry import CachedLayer
from ....bundle.entries.tensor_spec import TensorSpec
from ...architecture import Architecture, is_table
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import read_config
from ...family import Family
from ...parts import CachedForm, KeptAxes
from ...signature import Signature, text_entry
from .config import LANGUAGE, VISION, MatformerConfig, MatformerVitConfig
from .ops import (
    compare_weights,
    elastic_spec,
    language_model_ops,
    language_model_shapes,
    vision_model_ops,
    vision_model_shapes,
)

if TYPE_CHECKING:  # plans are made without torch
    import torch


def read_language_model(checkpoint: Checkpoint) -> Architecture:
    """The MatLM in ``checkpoint``, whose weights may be absent altogether."""
    config = read_config(checkpoint, MatformerConfig)
    shapes = language_model_shapes(config)
    if checkpoint.has_weights:
        compare_weights(checkpoint, config, shapes)
    return Architecture(
        spec=elastic_spec(config, shapes),
        signature=_language_signature(checkpoint, config),
        parameter_shapes=shapes,
        workload=partial(language_model_ops, config),
        load=_loads(checkpoint),
        is_embedding=is_embedding,
        cached=_cached(config),
    )


def read_vision_model(checkpoint: Checkpoint) -> Architecture:
    """The MatViT in ``checkpoint``, whose weights may be absent altogether."""
    config = read_config(checkpoint, MatformerVitConfig)
    shapes = vision_model_shapes(config)
    if checkpoint.has_weights:
        compare_weights(checkpoint, config, shapes)
    return Architecture(
        spec=elastic_spec(config, shapes),
        signature=_vision_signature(config),
        parameter_shapes=shapes,
        workload=partial(vision_model_ops, config),
        load=_loads(checkpoint),
    )


FAMILIES = (
    Family(
        "matformer_lm",
        ("matformer_lm",),
        read_language_model,
        reads_config_alone=True,
        presets={name: config.to_json() for name, config in LANGUAGE.items()},
    ),
    Family(
        "matformer_vit",
        ("matformer_vit",),
        read_vision_model,
        reads_config_alone=True,
        presets={name: config.to_json() for name, config in VISION.items()},
    ),
)


def _loads(checkpoint: Checkpoint) -> Callable[[], torch.nn.Module]:
    def load() -> torch.nn.Module:
        from .model import OneInput, model_of

        return OneInput(model_of(checkpoint))

    return load


def _language_signature(checkpoint: Checkpoint, config: MatformerConfig) -> Signature:
    tokens = ("batch", "sequence")
    # No mask: attention is causal, so padding on the right changes nothing before it.
    ids = TensorSpec("input_ids", "int64", tokens, pad=0, high=config.vocab_size)
    logits = TensorSpec("logits", "float32", (*tokens, config.vocab_size), role="next_tokens")
    return Signature((ids,), (logits,), config.max_position_embeddings, text=text_entry(checkpoint, "input_ids"))


def _vision_signature(config: MatformerVitConfig) -> Signature:
    dims = ("batch", config.num_channels, config.image_size, config.image_size)
    # Rows do not see each other, so rows of zeros fill a batch up to its bucket.
    pixels = TensorSpec("pixel_values", "float32", dims, pad=0)
    logits = TensorSpec("logits", "float32", ("batch", config.num_labels), role="classes")
    embedding = TensorSpec("embedding", "float32", ("batch", config.hidden_size), role="embedding")
    return Signature((pixels,), (logits, embedding))


def _cached(config: MatformerConfig) -> CachedForm:
    def cached(module: torch.nn.Module) -> torch.nn.Module:
        from .model import CachedLM

        return CachedLM(module.model).eval()

    def recorded(module: torch.nn.Module) -> torch.nn.Module:
        from .model import RecordedLM

        return RecordedLM(module.model).eval()

    layers = (CachedLayer(config.num_attention_heads, config.head_dim),) * config.num_hidden_layers
    axes = tuple(KeptAxes(f"layers.{layer}.heads") for layer in range(len(layers))) if config.nested_heads else ()
    return CachedForm(config.vocab_size, config.max_position_embeddings, layers, cached, recorded, kept=axes)


def is_embedding(parameter: str, shape: tuple[int, ...]) -> bool:
    """The bias per token of the vocabulary counts with the table that it belongs to, as in the paper's figures."""
    return parameter == "lm_head.bias" or is_table(parameter, shape)
