"""Every parameter of an encoder with conditional adapters, and which of them shrink: known from its configuration.

Linear weights are ``[out, in]``, as torch stores them.
"""

from __future__ import annotations

from .....elastic import Axis, ElasticSpec, PrefixSlice
from ....hugging_face.layer_shapes import Shape, linear_shapes
from ....modules.relative_distance import RELATIVE_BUCKETS
from .config import REDUCTION, CodaConfig

WORDS, PLACES, TYPES = (f"embeddings.{table}.weight" for table in ("word", "position", "token_type"))
BIASES = "relative_bias.weight"
TABLES = (WORDS, PLACES, TYPES, BIASES)


def parameter_shapes(config: CodaConfig) -> dict[str, Shape]:
    """Parameters of ``CodaEncoder``."""
    d = config.hidden_size
    shapes = _embeddings(config)
    if config.position == "learned":
        shapes[PLACES] = (config.most_tokens, d)
    if config.position == "relative":
        shapes[BIASES] = (RELATIVE_BUCKETS, config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
        shapes |= _layer(config, layer)
    shapes |= _norm(config, "norm" if config.norm_place == "before" else "embeddings.norm")
    if config.num_labels is not None:
        shapes |= linear_shapes("classifier", d, config.num_labels)
    return shapes


def elastic_spec(config: CodaConfig) -> ElasticSpec:
    """The axes ``layers.N.ffn`` and, where the model is offered at several reductions, ``coda.reduction``."""
    axes: list[Axis] = []
    slices: list[PrefixSlice] = []
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}.ffn"
        axes.append(Axis(at, config.intermediate_size))
        inward = ("gate", "up") if config.gated_ffn else ("up",)
        kinds = ("weight", "bias") if config.bias else ("weight",)
        slices += [PrefixSlice(f"{at}.{part}.{kind}", 0, at) for part in inward for kind in kinds]
        slices.append(PrefixSlice(f"{at}.down.weight", 1, at))
    if len(config.offered) > 1:
        axes.append(Axis(REDUCTION, config.offered[-1], config.offered))
    return ElasticSpec(
        tuple(axes), tuple(slices), config.nested, depth=config.num_hidden_layers, granularities=config.levels
    )


def parameter_group(parameter: str) -> str | None:
    """The group that ``inspect`` counts ``parameter`` in: what a task trains of a layer, beside the frozen model."""
    for part, group in ((".adapter.", "adapters"), (".router.", "routers"), ("norm.", "norms")):
        if part in parameter:
            return group
    return None


def _embeddings(config: CodaConfig) -> dict[str, Shape]:
    """Of tokens by their number and kind, or of an image's patches and the tokens before them."""
    d, image = config.hidden_size, config.image
    if image is None:
        assert config.vocab_size is not None
        kinds = {TYPES: (config.type_vocab_size, d)} if config.type_vocab_size else {}
        return {WORDS: (config.vocab_size, d), **kinds}
    shapes: dict[str, Shape] = {
        "embeddings.patch.weight": (d, image.channels, image.patch_height, image.patch_width),
        "embeddings.patch.bias": (d,),
    }
    if image.front_tokens:
        shapes["embeddings.front"] = (image.front_tokens, d)
    return shapes


def is_added(parameter: str) -> bool:
    """Whether an ordinary encoder has no such ``parameter``."""
    return parameter_group(parameter) in ("adapters", "routers") or parameter.startswith("classifier.")


def is_of_task(parameter: str) -> bool:
    """Whether every task has ``parameter`` of its own; all others are frozen."""
    return is_added(parameter) or parameter_group(parameter) == "norms"


def temperature_names(config: CodaConfig) -> list[str]:
    """The constants with the temperatures of the soft top-k: one for each conditional layer that has it."""
    layers = config.conditional if config.soft_top_k is not None else ()
    return [f"layers.{layer}.router.temperatures" for layer in layers]


def _layer(config: CodaConfig, layer: int) -> dict[str, Shape]:
    at, d, f = f"layers.{layer}", config.hidden_size, config.intermediate_size
    inner, shared = (heads * config.head_size for heads in (config.num_attention_heads, config.key_value_heads))
    shapes = _norm(config, f"{at}.attention_norm") | _norm(config, f"{at}.ffn_norm")
    for part, width in (("query", inner), ("key", shared), ("value", shared)):
        shapes |= linear_shapes(f"{at}.attention.{part}", d, width, config.bias)
    shapes |= linear_shapes(f"{at}.attention.output", inner, d, config.bias)
    for part in ("gate", "up") if config.gated_ffn else ("up",):
        shapes |= linear_shapes(f"{at}.ffn.{part}", d, f, config.bias)
    shapes |= linear_shapes(f"{at}.ffn.down", f, d, config.bias)
    if config.adapter == "lora":
        ends, bias = {".query": inner, ".value": shared}, False
    else:
        ends, bias = {"": d}, config.adapter_bias
    for part, width in ends.items():
        shapes |= linear_shapes(f"{at}.adapter{part}.down", d, config.adapter_size, bias)
        shapes |= linear_shapes(f"{at}.adapter{part}.up", config.adapter_size, width, bias)
    if config.has_scores and layer in config.conditional:
        shapes[f"{at}.router.weight"] = (d,)
    return shapes


def _norm(config: CodaConfig, name: str) -> dict[str, Shape]:
    """A scale alone for RMSNorm, which LayerNorm shifts as well."""
    kinds = ("weight",) if config.norm == "rms" else ("weight", "bias")
    return {f"{name}.{kind}": (config.hidden_size,) for kind in kinds}
