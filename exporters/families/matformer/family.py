"""MatFormer: MatLM, a nested decoder-only language model, and MatViT, a nested vision transformer.

See docs/matformer.md.

Axes per layer: ``ffn`` (rows of ``ffn.up``, columns of ``ffn.down``) and, where the configuration nests them, ``heads``
(blocks of ``head_dim`` rows of query, key and value, the same columns of ``attention.output``, and where positions are
a relative bias, its rows). Images have no sequence: buckets differ in their batch alone, while attention sees every
patch and the class token. Linear weights are ``[out, in]``, as torch stores them.
"""

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

if TYPE_CHECKING:
    from ...modules import attention as shared_attention
    from . import model
else:
    shared_attention = Deferred("...modules.attention", __package__)
    model = Deferred(".model", __package__)
from ....elastic import ElasticSpec
from ....workload import elementwise, linear, lookup, pre_norm_layer
from ...hugging_face.tensors import RELATIVE_BUCKETS


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
        lambda module: shared_attention.CachedLM(module.model),
        lambda module: model.RecordedLM(module.model),
        cache_axes=axes,
    )


def is_embedding(parameter: str, shape: tuple[int, ...]) -> bool:
    """The bias per token of the vocabulary counts with the table that it belongs to, as in the paper's figures."""
    return parameter == "lm_head.bias" or is_table(parameter, shape)


def language_parameters(config: MatformerConfig) -> Parameters:
    """Parameters of ``MatformerLM``; ``lm_head.weight`` only where it is not the embedding."""
    found, d = Parameters(), config.hidden_size
    found.add("embed_tokens.weight", config.vocab_size, d)
    for layer in range(config.num_hidden_layers):
        _add_layer(found, config, layer, config.bias, config.norm_weights, config.position == "relative_bias")
    if config.norm_weights:
        found.norm("norm", d)
    if not config.tie_word_embeddings:
        found.add("lm_head.weight", config.vocab_size, d)
    if config.bias:
        found.add("lm_head.bias", config.vocab_size)
    return found


def vision_parameters(config: MatformerVitConfig) -> Parameters:
    """Parameters of ``MatformerViT``: biases and norm weights everywhere, as in the standard ViT."""
    found, d, patch = Parameters(), config.hidden_size, config.patch_size
    found.add("patch.weight", d, config.num_channels, patch, patch)
    found.add("patch.bias", d)
    found.add("cls_token", 1, 1, d)
    found.add("position_embedding", 1, config.patches + 1, d)
    for layer in range(config.num_hidden_layers):
        _add_layer(found, config, layer)
    found.norm("norm", d)
    found.linear("head", d, config.num_labels)
    return found


def _add_layer(
    found: Parameters,
    config: NestedConfig,
    layer: int,
    bias: bool = True,
    has_norm_weights: bool = True,
    is_relative: bool = False,
) -> None:
    d, at, width = config.hidden_size, f"layers.{layer}", config.widths[layer]
    ffn, unit = found.axis(f"{at}.ffn", width), config.head_dim
    heads = found.axis(f"{at}.heads", config.num_attention_heads) if config.nested_heads else None
    if is_relative:
        found.add(f"{at}.relative_bias.weight", config.num_attention_heads, RELATIVE_BUCKETS, rows=heads)
    if has_norm_weights:
        found.norm(f"{at}.attention_norm", d)
        found.norm(f"{at}.ffn_norm", d)
    for part in ("query", "key", "value"):
        found.linear(f"{at}.attention.{part}", d, d, bias, rows=heads, unit=unit)
    found.linear(f"{at}.attention.output", d, d, bias, columns=heads, unit=unit)
    found.linear(f"{at}.ffn.up", d, width, bias, rows=ffn)
    found.linear(f"{at}.ffn.down", width, d, bias, columns=ffn)


def elastic_spec(config: NestedConfig, parameters: Parameters) -> ElasticSpec:
    """The axes ``layers.N.ffn`` and, with nested heads, ``layers.N.heads``, and how they slice ``parameters``."""
    return ElasticSpec(
        tuple(parameters.axes),
        tuple(parameters.slices),
        config.nested,
        depth=config.num_hidden_layers,
        granularities=config.levels,
    )


def language_model_ops(config: MatformerConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """One pass of ``MatformerLM`` at ``bucket``, with the logits of every position."""
    d, t = config.hidden_size, bucket.tokens
    ops = [lookup("embed_tokens", t * d)]
    for layer in range(config.num_hidden_layers):
        ops += layer_ops(config, submodel, bucket, layer, config.bias)
        ops += _position_ops(config, submodel, bucket, layer)
    ops.append(elementwise("norm", t * d, passes=4))
    return [*ops, linear("lm_head", t, d, config.vocab_size, config.bias)]


def vision_model_ops(config: MatformerVitConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """One pass of ``MatformerViT`` over ``bucket.batch`` images, each of as many tokens as it has patches and one."""
    d, rows = config.hidden_size, bucket.batch
    image = Bucket(rows, config.patches + 1)
    ops = [
        linear("patch", rows * config.patches, config.num_channels * config.patch_size**2, d),
        elementwise("positions", image.tokens * d, passes=5),
    ]
    for layer in range(config.num_hidden_layers):
        ops += layer_ops(config, submodel, image, layer, bias=True)
    return [*ops, elementwise("norm", rows * d, passes=4), linear("head", rows, d, config.num_labels)]


def layer_ops(config: NestedConfig, submodel: Submodel, bucket: Bucket, layer: int, bias: bool) -> list[Op]:
    """One pre-norm layer on ``bucket``'s tokens: attention and FFN, each with its norm and residual."""
    at = f"layers.{layer}"
    heads, width = heads_of(config, submodel, layer), submodel[f"{at}.ffn"]
    return pre_norm_layer(at, bucket, config.hidden_size, heads, config.head_dim, width, bias)


def _position_ops(config: MatformerConfig, submodel: Submodel, bucket: Bucket, layer: int) -> list[Op]:
    at, heads = f"layers.{layer}", heads_of(config, submodel, layer)
    if config.position == "rotary":
        turned = 2 * bucket.tokens * heads * config.head_dim
        return [elementwise(f"{at}.attention.rotary", turned, passes=4)]
    pairs = heads * bucket.sequence**2  # the same for every row of the batch
    return [lookup(f"{at}.relative_bias", pairs), elementwise(f"{at}.relative_bias.mask", pairs, passes=3)]


def heads_of(config: NestedConfig, submodel: Submodel, layer: int) -> int:
    """Heads of ``layer`` in ``submodel``: all of them where heads are no axis."""
    return submodel[f"layers.{layer}.heads"] if config.nested_heads else config.num_attention_heads
