"""MatFormer: MatLM, a nested decoder-only language model, and MatViT, a nested vision transformer.

See docs/matformer.md.

Axes per layer: ``ffn`` (rows of ``ffn.up``, columns of ``ffn.down``) and, where the configuration nests them, ``heads``
(blocks of ``head_dim`` rows of query, key and value, the same columns of ``attention.output``, and where positions are
a relative bias, its rows). Images have no sequence: buckets differ in their batch alone, while attention sees every
patch and the class token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ....bucket import Bucket
from ....bundle.entries.generation_entry import CachedLayer
from ....bundle.entries.tensor_spec import TensorSpec
from ....elastic import Submodel
from ....workload import Op
from ...architecture import Architecture, is_table
from ...checkpoints.checkpoint import Checkpoint, compare_with_headers
from ...checkpoints.own_folder import read_config
from ...family import Deferred, own_family
from ...hugging_face.tensors import Parameters
from ...parts import CacheAxes, CachedSpec
from ...signature import Signature, text_signature
from .config import LANGUAGE, VISION, MatformerConfig, MatformerVitConfig, NestedConfig
from .ops import elastic_spec, language_model_ops, language_parameters, vision_model_ops, vision_parameters

if TYPE_CHECKING:
    from ...modules import cached_attention
    from . import model
else:
    cached_attention = Deferred("...modules.cached_attention", __package__)
    model = Deferred(".model", __package__)


def read_language_model(checkpoint: Checkpoint) -> Architecture:
    """The MatLM in ``checkpoint``, whose weights may be absent altogether."""
    config = read_config(checkpoint, MatformerConfig)
    # No mask: attention is causal, so padding on the right changes nothing before it.
    logits = TensorSpec("logits", "float32", ("batch", "sequence", config.vocab_size), role="next_tokens")
    signature = text_signature(checkpoint, (logits,), config.max_position_embeddings, config.vocab_size)
    found = _read(checkpoint, config, language_parameters(config), signature, partial(language_model_ops, config))
    return replace(found, is_embedding=is_embedding, cached=_cached(config))


def read_vision_model(checkpoint: Checkpoint) -> Architecture:
    """The MatViT in ``checkpoint``, whose weights may be absent altogether."""
    config = read_config(checkpoint, MatformerVitConfig)
    dims = ("batch", config.num_channels, config.image_size, config.image_size)
    # Rows do not see each other, so rows of zeros fill a batch up to its bucket.
    pixels = TensorSpec("pixel_values", "float32", dims, pad=0)
    logits = TensorSpec("logits", "float32", ("batch", config.num_labels), role="classes")
    embedding = TensorSpec("embedding", "float32", ("batch", config.hidden_size), role="embedding")
    signature = Signature((pixels,), (logits, embedding))
    return _read(checkpoint, config, vision_parameters(config), signature, partial(vision_model_ops, config))


def _read(
    checkpoint: Checkpoint,
    config: NestedConfig,
    parameters: Parameters,
    signature: Signature,
    workload: Callable[[Submodel, Bucket], list[Op]],
) -> Architecture:
    if checkpoint.has_weights:
        compare_with_headers(checkpoint, parameters.shapes)
    return Architecture(
        elastic_spec(config, parameters),
        signature,
        parameters.shapes,
        workload,
        load=lambda: model.answering(checkpoint, config),
    )


FAMILIES = (
    own_family("matformer_lm", read_language_model, LANGUAGE),
    own_family("matformer_vit", read_vision_model, VISION),
)


def _cached(config: MatformerConfig) -> CachedSpec:
    layers = (CachedLayer(config.num_attention_heads, config.head_dim),) * config.num_hidden_layers
    axes = tuple(CacheAxes(f"layers.{layer}.heads") for layer in range(len(layers))) if config.nested_heads else ()
    return CachedSpec(
        config.vocab_size,
        config.max_position_embeddings,
        layers,
        lambda module: cached_attention.CachedLM(module.model),
        lambda module: model.RecordedLM(module.model),
        cache_axes=axes,
    )


def is_embedding(parameter: str, shape: tuple[int, ...]) -> bool:
    """The bias per token of the vocabulary counts with the table that it belongs to, as in the paper's figures."""
    return parameter == "lm_head.bias" or is_table(parameter, shape)
