"""Parameters, axes and operations of MatFormer models, from their configuration alone (no torch here).

Linear weights are ``[out, in]``, as torch stores them.
"""

from __future__ import annotations

from collections.abc import Mapping

from ....bucket import Bucket
from ....elastic import Axis, ElasticSpec, PrefixSlice, Submodel
from ....errors import CheckpointError
from ....workload import Op, elementwise, linear, lookup, pre_norm_layer
from ...checkpoints.checkpoint import Checkpoint, compare_with_headers
from ...hugging_face.tensors import RELATIVE_BUCKETS, Shape, linear_shapes, norm_shapes
from .config import MatformerConfig, MatformerVitConfig, NestedConfig


def language_model_shapes(config: MatformerConfig) -> dict[str, Shape]:
    """Parameters of ``MatformerLM``; ``lm_head.weight`` only where it is not the embedding."""
    d = config.hidden_size
    shapes: dict[str, Shape] = {"embed_tokens.weight": (config.vocab_size, d)}
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}"
        if config.position == "relative_bias":
            shapes[_relative_bias(at)] = (config.num_attention_heads, RELATIVE_BUCKETS)
        if config.norm_weights:
            shapes |= norm_shapes(f"{at}.attention_norm", d) | norm_shapes(f"{at}.ffn_norm", d)
        shapes |= _layer(config, layer, config.bias)
    if config.norm_weights:
        shapes |= norm_shapes("norm", d)
    head = linear_shapes("lm_head", d, config.vocab_size, config.bias)
    if config.tie_word_embeddings:
        del head["lm_head.weight"]
    return shapes | head


def vision_model_shapes(config: MatformerVitConfig) -> dict[str, Shape]:
    """Parameters of ``MatformerViT``: biases and norm weights everywhere, as in the standard ViT."""
    d, patch = config.hidden_size, config.patch_size
    shapes: dict[str, Shape] = {
        "patch.weight": (d, config.num_channels, patch, patch),
        "patch.bias": (d,),
        "cls_token": (1, 1, d),
        "position_embedding": (1, config.patches + 1, d),
    }
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}"
        shapes |= (
            norm_shapes(f"{at}.attention_norm", d) | norm_shapes(f"{at}.ffn_norm", d) | _layer(config, layer, bias=True)
        )
    return shapes | norm_shapes("norm", d) | linear_shapes("head", d, config.num_labels, bias=True)


def _layer(config: NestedConfig, layer: int, bias: bool) -> dict[str, Shape]:
    d, at = config.hidden_size, f"layers.{layer}"
    shapes: dict[str, Shape] = {}
    for part in ("query", "key", "value", "output"):
        shapes |= linear_shapes(f"{at}.attention.{part}", d, d, bias)
    width = config.widths[layer]
    return shapes | linear_shapes(f"{at}.ffn.up", d, width, bias) | linear_shapes(f"{at}.ffn.down", width, d, bias)


def _relative_bias(layer: str) -> str:
    return f"{layer}.relative_bias.weight"


def elastic_spec(config: NestedConfig, shapes: Mapping[str, Shape]) -> ElasticSpec:
    """The axes ``layers.N.ffn`` and, with nested heads, ``layers.N.heads``, and the slices of ``shapes``."""
    axes: list[Axis] = []
    slices: list[PrefixSlice] = []
    for layer, width in enumerate(config.widths):
        at = f"layers.{layer}"
        ffn = Axis(f"{at}.ffn", width)
        axes.append(ffn)
        slices += [PrefixSlice(f"{at}.ffn.up.{kind}", 0, ffn.name) for kind in ("weight", "bias")]
        slices.append(PrefixSlice(f"{at}.ffn.down.weight", 1, ffn.name))
        if config.nested_heads:
            heads = Axis(f"{at}.heads", config.num_attention_heads)
            axes.append(heads)
            slices += [
                PrefixSlice(f"{at}.attention.{part}.{kind}", 0, heads.name, config.head_dim)
                for part in ("query", "key", "value")
                for kind in ("weight", "bias")
            ]
            slices.append(PrefixSlice(f"{at}.attention.output.weight", 1, heads.name, config.head_dim))
            slices.append(PrefixSlice(_relative_bias(at), 0, heads.name))
    return ElasticSpec(
        tuple(axes),
        tuple(cut for cut in slices if cut.parameter in shapes),
        config.nested,
        depth=config.num_hidden_layers,
        granularities=config.levels,
    )


def compare_weights(checkpoint: Checkpoint, config: NestedConfig, shapes: Mapping[str, Shape]) -> None:
    """Raises CheckpointError unless the weights hold exactly ``shapes``."""
    for layer, width in enumerate(config.widths):
        up = checkpoint.tensors.get(f"layers.{layer}.ffn.up.weight")
        if up is not None and up.shape and width > up.shape[0]:
            raise CheckpointError(
                f"{checkpoint.folder / 'config.json'}: intermediate_size: layer {layer} is {width} neurons wide, but "
                f"the weights hold {up.shape[0]}"
            )
    compare_with_headers(checkpoint, shapes)


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
