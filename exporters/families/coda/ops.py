"""Parameters, axes and operations of encoders with conditional adapters, from their configuration (no torch here).

Linear weights are ``[out, in]``, as torch stores them. k, the tokens that a conditional layer computes, is a static
number of an engine. Reading selected tokens and adding to them, which engines may have in several variants, is left out
of ``forward_ops``: ``variant_ops`` has it.
"""

from ....bucket import Bucket
from ....elastic import Axis, ElasticSpec, Submodel
from ....errors import PlanError
from ....workload import Op, added_rows, attention_products, elementwise, linear, lookup, one_hot_product
from ...hugging_face.tensors import RELATIVE_BUCKETS, Parameters
from .config import REDUCTION, CodaConfig, tokens_of_layers

DISPATCH, COMBINE = "coda.dispatch", "coda.combine"
WORDS, PLACES, TYPES = (f"embeddings.{table}.weight" for table in ("word", "position", "token_type"))
BIASES = "relative_bias.weight"
TABLES = (WORDS, PLACES, TYPES, BIASES)


def parameters(config: CodaConfig) -> Parameters:
    """Parameters of ``CodaEncoder``; axes are ``layers.N.ffn`` and, where the model is offered at several reductions,
    ``coda.reduction``."""
    found, d, image = Parameters(), config.hidden_size, config.image
    if image is None:
        assert config.vocab_size is not None
        found.add(WORDS, config.vocab_size, d)
        if config.type_vocab_size:
            found.add(TYPES, config.type_vocab_size, d)
    else:
        found.add("embeddings.patch.weight", d, image.channels, image.patch_height, image.patch_width)
        found.add("embeddings.patch.bias", d)
        if image.front_tokens:
            found.add("embeddings.front", image.front_tokens, d)
    if config.position == "learned":
        found.add(PLACES, config.most_tokens, d)
    if config.position == "relative":
        found.add(BIASES, RELATIVE_BUCKETS, config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
        _add_layer(found, config, layer)
    found.norm("norm" if config.norm_place == "before" else "embeddings.norm", d, config.norm == "layer")
    if config.num_labels is not None:
        found.linear("classifier", d, config.num_labels)
    if len(config.offered) > 1:
        found.axes.append(Axis(REDUCTION, config.offered[-1], config.offered))
    return found


def _add_layer(found: Parameters, config: CodaConfig, layer: int) -> None:
    at, d, f, bias = f"layers.{layer}", config.hidden_size, config.intermediate_size, config.bias
    inner, shared, ffn = config.inner, config.key_value_heads * config.head_size, found.axis(f"{at}.ffn", f)
    for norm in ("attention_norm", "ffn_norm"):
        found.norm(f"{at}.{norm}", d, config.norm == "layer")
    for part, width in (("query", inner), ("key", shared), ("value", shared)):
        found.linear(f"{at}.attention.{part}", d, width, bias)
    found.linear(f"{at}.attention.output", inner, d, bias)
    for part in ("gate", "up") if config.gated_ffn else ("up",):
        found.linear(f"{ffn}.{part}", d, f, bias, rows=ffn)
    found.linear(f"{ffn}.down", f, d, bias, columns=ffn)
    ends = {".query": inner, ".value": shared} if config.adapter == "lora" else {"": d}
    bias = config.adapter_bias and config.adapter != "lora"
    for part, width in ends.items():
        found.linear(f"{at}.adapter{part}.down", d, config.adapter_size, bias)
        found.linear(f"{at}.adapter{part}.up", config.adapter_size, width, bias)
    if config.has_scores and layer in config.conditional:
        found.add(f"{at}.router.weight", d)


def elastic_spec(config: CodaConfig) -> ElasticSpec:
    """Axes and slices of ``parameters``."""
    found = parameters(config)
    axes, slices = tuple(found.axes), tuple(found.slices)
    return ElasticSpec(axes, slices, config.nested, depth=config.num_hidden_layers, granularities=config.levels)


def parameter_group(parameter: str) -> str | None:
    """The group that ``inspect`` counts ``parameter`` in: what a task trains of a layer, beside the frozen model."""
    for part, group in ((".adapter.", "adapters"), (".router.", "routers"), ("norm.", "norms")):
        if part in parameter:
            return group
    return None


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


def reduction_of(config: CodaConfig, submodel: Submodel) -> int:
    """The r of ``submodel``."""
    chosen = {axis.name: value for axis, value in submodel.values}
    return chosen.get(REDUCTION, config.offered[-1])


def selects(config: CodaConfig, reduction: int) -> bool:
    """Whether conditional layers choose tokens at ``reduction``; else all pass, without a gate."""
    return bool(config.conditional) and (reduction > 1 or config.reduction_of_one == "routed")


def token_bucket(config: CodaConfig, bucket: Bucket) -> Bucket:
    """The tokens that layers see at ``bucket``: of images, whose buckets have no sequence, always as many."""
    return bucket if config.image is None else Bucket(bucket.batch, config.image.tokens)


def layer_tokens(config: CodaConfig, tokens: int, reduction: int, any_length: bool = False) -> dict[int, int]:
    """By conditional layer how many of the ``tokens`` of a row it computes; empty where all pass without a gate. In
    rows of ``any_length`` it is one where there are fewer than the reduction.

    Raises PlanError for a reduction below 1 or, otherwise, above ``tokens``.
    """
    if not selects(config, reduction):
        return {}
    if not any_length and not 1 <= reduction <= tokens:
        raise PlanError(f"{REDUCTION} {reduction}: expected 1 to {tokens}, the tokens of a row")
    layers = config.conditional
    return dict(zip(layers, tokens_of_layers(config.tokens_selected, tokens, reduction, len(layers)), strict=True))


def selected_counts(config: CodaConfig, submodel: Submodel, bucket: Bucket) -> dict[int, int]:
    """``layer_tokens`` of ``submodel`` at ``bucket``. Raises PlanError for a reduction above the tokens of a row."""
    try:
        return layer_tokens(config, token_bucket(config, bucket).sequence, reduction_of(config, submodel))
    except PlanError as failure:
        raise PlanError(
            f"bucket {bucket.label}: {failure}; ask for a longer bucket, or leave that level out "
            f"(`levels` of {REDUCTION})"
        ) from None


def forward_ops(config: CodaConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """One pass of ``CodaEncoder``. Raises PlanError for a reduction above the tokens of a row."""
    counts, bucket = selected_counts(config, submodel, bucket), token_bucket(config, bucket)
    d, t, n = config.hidden_size, bucket.tokens, bucket.sequence
    ops = _embedding_ops(config, bucket)
    if config.position == "learned":
        ops.append(elementwise("embeddings.position", t * d, passes=3))
    of_pairs = config.keys_of == "selected"  # of selected queries and keys: each layer makes those of its own
    if config.position == "relative" and not (of_pairs and len(counts) == config.num_hidden_layers):
        ops += _bias_ops("relative_bias", n * n * config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
        at, asking = f"layers.{layer}", n
        ops.append(elementwise(f"{at}.attention_norm", t * d, passes=4))
        if config.adapter != "lora":
            ops += [
                linear(f"{at}.adapter.down", t, d, config.adapter_size, config.adapter_bias),
                elementwise(f"{at}.adapter.activation", t * config.adapter_size, passes=2),
                linear(f"{at}.adapter.up", t, config.adapter_size, d, config.adapter_bias),
                elementwise(f"{at}.adapter.residual", t * d, passes=3),
            ]
        if layer in counts:
            asking = counts[layer]
            ops += _router_ops(config, f"{at}.router", bucket)
            ops.append(elementwise(f"{at}.gates", bucket.batch * asking * d, passes=2))
        reads = asking if of_pairs else n
        ops += _attention_ops(config, f"{at}.attention", bucket.batch, asking, reads)
        if config.position == "relative" and layer in counts:
            scores = bucket.batch * config.num_attention_heads * asking * reads
            ops += _bias_ops(f"{at}.bias", scores) if of_pairs else [lookup(f"{at}.bias", scores)]
        ops += _ffn_ops(config, at, bucket.batch * asking, submodel[f"{at}.ffn"])
    ops.append(elementwise("norm", t * d, passes=4))  # at the end, or of the embeddings
    if config.num_labels is not None:
        ops += [elementwise("mean", t * d, passes=2), linear("classifier", bucket.batch, d, config.num_labels)]
    return ops


def _embedding_ops(config: CodaConfig, bucket: Bucket) -> list[Op]:
    d, t, image = config.hidden_size, bucket.tokens, config.image
    if image is not None:
        numbers = image.channels * image.patch_height * image.patch_width
        return [linear("embeddings.patch", bucket.batch * image.patches, numbers, d)]
    ops = [lookup("embeddings", t * d)]
    if config.type_vocab_size:
        ops += [lookup("embeddings.token_type", t * d), elementwise("embeddings.token_type.sum", t * d, passes=3)]
    return ops


def _bias_ops(name: str, pairs: int) -> list[Op]:
    """Relative biases by the steps of ``pairs``, of each head."""
    return [lookup(name, pairs), elementwise(f"{name}.turn", pairs, passes=2)]


def _router_ops(config: CodaConfig, at: str, bucket: Bucket) -> list[Op]:
    """Scores, the rounds of the soft top-k one after the other, and the choice of the highest."""
    t = bucket.tokens
    if not config.has_scores:
        return [] if config.route_padding or config.image else [elementwise(f"{at}.top", t, passes=4)]
    ops = [elementwise(f"{at}.scores", t * config.hidden_size, passes=1), elementwise(f"{at}.mask", t, passes=2)]
    rounds = config.soft_top_k.rounds if config.soft_top_k else 0
    if rounds:
        ops.append(elementwise(f"{at}.shifted", (rounds + 1) * t, passes=5))
    for number in range(rounds):
        passes = {"softmax": 6, "level": 3, "ratio": 2, "minimum": 3}
        ops += [elementwise(f"{at}.{number}.{part}", t, count) for part, count in passes.items()]
    return [*ops, elementwise(f"{at}.gates", t, passes=8), elementwise(f"{at}.top", t, passes=4)]


def _attention_ops(config: CodaConfig, at: str, rows: int, asking: int, reads: int) -> list[Op]:
    """Operations of ``asking`` tokens of each row, for ``reads`` tokens of it."""
    d, heads, size, bias = config.hidden_size, config.num_attention_heads, config.head_size, config.bias
    inner, shared = heads * size, config.key_value_heads * size
    q, m, scores = rows * asking, rows * reads, rows * heads * asking * reads
    ops = [
        linear(f"{at}.query", q, d, inner, bias),
        linear(f"{at}.key", m, d, shared, bias),
        linear(f"{at}.value", m, d, shared, bias),
        elementwise(f"{at}.split", 2 * q * inner + 2 * m * shared, passes=2),
    ]
    if config.adapter == "lora":
        for part, tokens, width in (("query", q, inner), ("value", m, shared)):
            ops += [
                linear(f"{at}.{part}.low_rank.down", tokens, d, config.adapter_size, bias=False),
                linear(f"{at}.{part}.low_rank.up", tokens, config.adapter_size, width, bias=False),
                elementwise(f"{at}.{part}.low_rank.sum", tokens * width, passes=3),
            ]
    if config.position == "rotary":
        ops.append(elementwise(f"{at}.rotary", q * inner + m * shared, passes=4))
    return [
        *ops,
        *attention_products(at, scores, size, q * inner + m * shared, {"mask": 3, "softmax": 8}),
        linear(f"{at}.output", q, inner, d, bias),
    ]


def _ffn_ops(config: CodaConfig, at: str, tokens: int, width: int) -> list[Op]:
    d, bias = config.hidden_size, config.bias
    inward = ("gate", "up") if config.gated_ffn else ("up",)
    return [
        elementwise(f"{at}.ffn_norm", tokens * d, passes=7),  # with the sum before it
        *(linear(f"{at}.ffn.{part}", tokens, d, width, bias) for part in inward),
        elementwise(f"{at}.ffn.activation", tokens * width, passes=2 * len(inward)),
        linear(f"{at}.ffn.down", tokens, width, d, bias),
        elementwise(f"{at}.sum", tokens * d, passes=6),
    ]


def variant_ops(config: CodaConfig, submodel: Submodel, bucket: Bucket) -> dict[str, dict[str, list[Op]]]:
    """Operations over all layers by computation and variant: each over all layers; nothing where all tokens pass.

    ``coda.dispatch``: by index (``gather``), or as a product with a matrix of zeros and ones (``one_hot``);
    ``coda.combine``: read, added and written by index (``scatter``), or such a product. ``Rows`` has the modules. The
    first variant is what figures without a device count.

    Raises PlanError for a reduction above the tokens of a row.
    """
    counts, bucket = selected_counts(config, submodel, bucket), token_bucket(config, bucket)
    if not counts:
        return {}
    d = config.hidden_size
    reads = ("normed", "raw") if config.reads_raw else ("normed",)
    at = {f"layers.{layer}": bucket.batch * count for layer, count in counts.items()}

    read = [(f"{layer}.dispatch.{what}", rows) for layer, rows in at.items() for what in reads]
    written = [(f"{layer}.combine", rows) for layer, rows in at.items()]

    def product(name: str, rows: int) -> list[Op]:
        return one_hot_product(name, rows, bucket.sequence, bucket.batch, d)

    return {
        DISPATCH: {
            "gather": [lookup(name, rows * d) for name, rows in read],
            "one_hot": [op for name, rows in read for op in product(name, rows)],
        },
        COMBINE: {
            "scatter": [op for name, rows in written for op in added_rows(name, rows * d, bucket.tokens * d)],
            "one_hot": [op for name, rows in written for op in product(name, rows)],
        },
    }
