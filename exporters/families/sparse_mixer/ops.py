"""Every parameter of a Sparse Mixer, and which of them shrink with what: known from its configuration alone.

Linear weights are ``[out, in]``, as torch stores them. Those of experts are stacked, ``[E, in, out]``, so that the
first experts are a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ....bucket import Bucket
from ....elastic import Axis, ElasticSpec, PrefixSlice, Submodel
from ....errors import CheckpointError
from ....workload import Op, added_rows, elementwise, feed_forward, linear, lookup, one_hot_product, self_attention
from ...checkpoints.checkpoint import Checkpoint, compare_with_headers
from ...hugging_face.tensors import Parameters, Shape
from .config import CAPACITY, EXPERTS, SPECTRAL, Routing, SparseMixerConfig, halves, parts_of, routing

TABLES = ("embeddings.word.weight", "embeddings.position.weight", "embeddings.token_type.weight")
_EXPERT_PARTS = ("up_weight", "up_bias", "down_weight", "down_bias")
_FLOAT32_BYTES = 4


def parameter_shapes(config: SparseMixerConfig) -> dict[str, Shape]:
    """Parameters of ``SparseMixer``; the head's matrix back to the vocabulary is that of the words, and not among
    them."""
    found, d, width = Parameters(), config.hidden_size, config.embedding_width
    rows = (config.vocab_size, config.max_position_embeddings, config.type_vocab_size)
    for name, count in zip(TABLES, rows, strict=True):
        found.add(name, count, width)
    found.norm("embeddings.norm", width)
    found.linear("embeddings.projection", width, d)
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}"
        if config.mixes(layer):
            _add_mixing(found, config, f"{at}.mixing")
        else:
            for part in ("query", "key", "value", "output"):
                found.linear(f"{at}.attention.{part}", d, d)
        found.norm(f"{at}.mixing_norm", d)
        if config.routes(layer):
            _add_experts(found, config, f"{at}.moe")
        else:
            found.linear(f"{at}.ffn.up", d, config.intermediate_size)
            found.linear(f"{at}.ffn.down", config.intermediate_size, d)
        found.norm(f"{at}.ffn_norm", d)
    if config.predicts_tokens:
        found.linear("head.transform", d, width)
        found.norm("head.norm", width)
        found.add("head.bias", config.vocab_size)
    if config.pools:
        found.linear("pooler", d, d)
    if config.num_labels is not None:
        found.linear("classifier", d, config.num_labels)
    return found.shapes


def _add_mixing(found: Parameters, config: SparseMixerConfig, at: str) -> None:
    """The learned parameters of mixing along the sequence and along the hidden axis; spectral mixing has none."""
    for side, size in (("sequence", config.max_position_embeddings), ("hidden", config.hidden_size)):
        shapes: dict[str, Shape] = {"linear": (size, size), "circulant": (size,), "toeplitz": (2 * size - 1,)}
        if config.mixing in shapes:
            found.add(f"{at}.{side}", *shapes[config.mixing])


def _add_experts(found: Parameters, config: SparseMixerConfig, at: str) -> None:
    count, d, f = config.num_experts, config.hidden_size, config.expert_width
    found.linear(f"{at}.router", d, count)
    for part, shape in zip(_EXPERT_PARTS, ((d, f), (f,), (f, d), (d,)), strict=True):
        found.add(f"{at}.experts.{part}", count, *shape)


def elastic_spec(config: SparseMixerConfig) -> ElasticSpec:
    """The axes that ``config.choices`` offers; experts alone slice parameters. The router follows their order, and
    keeps the scores of all.

    Levels lower the capacity alone, unless ``config.granularities`` says otherwise: every other axis makes a model that
    its training did not see.
    """
    choices = config.choices
    axes = tuple(Axis(name, values[-1], values) for name, values in choices.items())
    at = [f"layers.{layer}.moe" for layer in config.moe_layers if EXPERTS in choices]
    slices = tuple(PrefixSlice(f"{layer}.experts.{part}", 0, EXPERTS) for layer in at for part in _EXPERT_PARTS)
    scores = tuple(PrefixSlice(f"{layer}.router.{part}", 0, EXPERTS) for layer in at for part in ("weight", "bias"))
    granularities = config.granularities
    if granularities is None and choices:
        capacities = choices.get(CAPACITY)
        granularities = (
            {CAPACITY: tuple(value / capacities[-1] for value in capacities)}
            if capacities
            else {next(iter(choices)): (1.0,)}
        )
    return ElasticSpec(
        axes,
        slices,
        depth=config.num_hidden_layers,
        widths=frozenset(),
        granularities=granularities,
        order_followers=scores,
        per_layer_order=frozenset({EXPERTS}),  # an expert has nothing to do with those of its number in other layers
    )


def compare_weights(checkpoint: Checkpoint, config: SparseMixerConfig, shapes: Mapping[str, Shape]) -> None:
    """Raises CheckpointError unless the weights hold exactly ``shapes``."""
    where = checkpoint.folder / "config.json"
    for layer in range(config.num_hidden_layers):
        trained = _extent(checkpoint, f"layers.{layer}.moe.experts.up_weight")
        if config.routes(layer) and trained not in (None, config.num_experts):
            raise CheckpointError(
                f"{where}: num_experts: {config.num_experts}, but the weights of layer {layer} hold {trained}"
            )
        trained = _extent(checkpoint, f"layers.{layer}.mixing.sequence")
        if config.mixes(layer) and config.mixing == "toeplitz" and trained is not None:
            trained = (trained + 1) // 2
        if config.mixes(layer) and trained not in (None, config.max_position_embeddings):
            raise CheckpointError(
                f"{where}: max_position_embeddings: {config.max_position_embeddings}, but the {config.mixing} mixing "
                f"of layer {layer} is bound to the {trained} tokens that it was trained for"
            )
    compare_with_headers(checkpoint, shapes)


def _extent(checkpoint: Checkpoint, name: str) -> int | None:
    """The first extent of a stored tensor, or None where there is no such tensor or it is a single number."""
    header = checkpoint.tensors.get(name)
    return header.shape[0] if header is not None and header.shape else None


def forward_ops(config: SparseMixerConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """One pass of ``SparseMixer`` at ``bucket``. Raises PlanError for a capacity that rounds to no slots."""
    d, width, t = config.hidden_size, config.embedding_width, bucket.tokens
    ops = [
        lookup("embeddings", 3 * t * width),
        elementwise("embeddings.norm", t * width, passes=6),  # two sums and a norm
        linear("embeddings.projection", t, width, d),
    ]
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}"
        if not config.mixes(layer):
            ops += self_attention(f"{at}.attention", bucket, d, config.num_attention_heads, config.head_dim)
        elif config.mixing not in SPECTRAL:
            n = bucket.sequence
            ops.append(linear(f"{at}.mixing.hidden", t, d, d, bias=False))
            ops.append(linear(f"{at}.mixing.sequence", bucket.batch * d, n, n, bias=False))
        ops.append(elementwise(f"{at}.mixing_norm", t * d, passes=5))
        if config.routes(layer):
            ops += _expert_ops(config, f"{at}.moe", routing(config, submodel, bucket))
        else:
            ops += feed_forward(f"{at}.ffn", t, d, config.intermediate_size)
        ops.append(elementwise(f"{at}.ffn_norm", t * d, passes=5))
    return ops + head_ops(config, bucket.batch, t)


def head_ops(config: SparseMixerConfig, rows: int, positions: int) -> list[Op]:
    """The heads, over ``rows`` pooled first positions and ``positions`` whose tokens are predicted."""
    d, width, vocabulary = config.hidden_size, config.embedding_width, config.vocab_size
    ops: list[Op] = []
    if config.predicts_tokens:
        ops += [
            linear("head.transform", positions, d, width),
            elementwise("head.norm", positions * width, passes=6),  # the activation and a norm
            linear("head.decoder", positions, width, vocabulary),
        ]
    if config.pools:
        ops += [linear("pooler", rows, d, d), elementwise("pooler.activation", rows * d, passes=2)]
    if config.num_labels is not None:
        ops.append(linear("classifier", rows, d, config.num_labels))
    return ops


def _expert_ops(config: SparseMixerConfig, at: str, route: Routing) -> list[Op]:
    """Router and experts of one layer, but for their products and what brings tokens there and back."""
    d, t, slots = config.hidden_size, route.groups * route.tokens, route.slots
    scores = t * route.trained_experts
    return [
        linear(f"{at}.router", t, d, route.trained_experts),
        elementwise(f"{at}.router.softmax", scores, passes=8),
        elementwise(f"{at}.router.top", scores, passes=4),
        elementwise(f"{at}.experts.activation", slots * config.expert_width, passes=2),
        elementwise(f"{at}.experts.gates", slots * d, passes=2),
    ]


def variant_ops(config: SparseMixerConfig, submodel: Submodel, bucket: Bucket) -> Variants:
    """Operations over all layers by computation and variant: each over all layers; ``bucket`` is the submodel's own.

    ``moe.dispatch`` and ``moe.combine`` bring tokens to experts and back: ``gather`` by index, ``one_hot`` as a product
    with a matrix of zeros and ones, as the reference does; ``scatter`` adds expert by expert to rows of the answer.
    ``moe.products``: experts ``batched`` over stacked weights, or ``per_expert``. ``mixing`` (spectral alone):
    ``dense`` products with matrices of cosines and sines, or ``folded`` by their symmetry. moe.py and mixing.py
    have the modules. The first variant is what figures without a device count.

    Raises PlanError for a capacity that rounds to no slots.
    """
    variants: Variants = {}
    if config.moe_layers:
        route = routing(config, submodel, bucket)
        variants = {
            computed: {
                variant: [op for layer in config.moe_layers for op in ops(config, f"layers.{layer}.moe", route)]
                for variant, ops in of.items()
            }
            for computed, of in _EXPERT_OPS.items()
        }
    mixing = [layer for layer in range(config.num_hidden_layers) if config.mixes(layer)]
    if mixing and config.mixing in SPECTRAL:
        variants["mixing"] = {
            variant: [op for layer in mixing for op in ops(config, f"layers.{layer}.mixing", bucket)]
            for variant, ops in (("dense", _dense), ("folded", _folded))
        }
    return variants


Variants = dict[str, dict[str, list[Op]]]


def _gather(config: SparseMixerConfig, at: str, route: Routing) -> list[Op]:
    return [lookup(f"{at}.dispatch", route.slots * config.hidden_size)]


def _one_hot(config: SparseMixerConfig, at: str, route: Routing, part: str) -> list[Op]:
    return one_hot_product(f"{at}.{part}", route.slots, route.tokens, route.groups, config.hidden_size)


def _batched(config: SparseMixerConfig, at: str, route: Routing) -> list[Op]:
    """ONNX Runtime packs a matrix once, when an engine is opened, and a stack of them at every pass."""
    d, f = config.hidden_size, config.expert_width
    return [
        elementwise(f"{at}.experts.pack", 2 * route.experts * d * f, passes=2),
        _stacked(f"{at}.experts.up", route, d, f),
        elementwise(f"{at}.experts.up.bias", route.slots * f, passes=2),
        _stacked(f"{at}.experts.down", route, f, d),
        elementwise(f"{at}.experts.down.bias", route.slots * d, passes=2),
    ]


def _per_expert(config: SparseMixerConfig, at: str, route: Routing) -> list[Op]:
    d, f, rows = config.hidden_size, config.expert_width, route.groups * route.capacity
    return [
        op
        for expert in range(route.experts)
        for op in (
            linear(f"{at}.experts.{expert}.up", rows, d, f),
            linear(f"{at}.experts.{expert}.down", rows, f, d),
            elementwise(f"{at}.experts.{expert}.stack", rows * d, passes=2),
        )
    ]


def _gather_back(config: SparseMixerConfig, at: str, route: Routing) -> list[Op]:
    """Every token asks each expert that may have taken it for its slot; where tokens choose, that is one expert."""
    per_token = 1 if config.router == "tokens_choose" else route.experts
    elements = route.groups * route.tokens * config.hidden_size
    table = elementwise(f"{at}.combine.table", route.slots * config.hidden_size, passes=2)
    read = [lookup(f"{at}.combine.{expert}", elements) for expert in range(per_token)]
    return [
        table,
        *read,
        *(elementwise(f"{at}.combine.{expert}.sum", elements, passes=3) for expert in range(1, per_token)),
    ]


def _scatter(config: SparseMixerConfig, at: str, route: Routing) -> list[Op]:
    """ONNX Runtime copies the whole answer for every expert."""
    whole = route.groups * route.tokens * config.hidden_size
    elements = route.groups * route.capacity * config.hidden_size
    return [op for expert in range(route.experts) for op in added_rows(f"{at}.combine.{expert}", elements, whole)]


def _stacked(name: str, route: Routing, inputs: int, outputs: int) -> Op:
    """One product per expert, over all slots."""
    weights = route.experts * (inputs + 1) * outputs * _FLOAT32_BYTES
    moved = route.slots * (inputs + outputs) * _FLOAT32_BYTES
    return Op(name, "gemm", 2 * route.slots * inputs * outputs, weights, moved)


def _dense(config: SparseMixerConfig, at: str, bucket: Bucket) -> list[Op]:
    """``X [C|S]`` along the hidden axis, then the matching pair along the sequence."""
    pairs, d, n = parts_of(config.mixing), config.hidden_size, bucket.sequence
    return [
        linear(f"{at}.hidden", bucket.tokens, d, pairs * d, bias=False),
        linear(f"{at}.sequence", bucket.batch * d, pairs * n, n, bias=False),
    ]


def _folded(config: SparseMixerConfig, at: str, bucket: Bucket) -> list[Op]:
    """Cosines are even and sines odd: ``x[k] + x[N-k]`` and ``x[k] - x[N-k]`` halve either side of each product."""
    (even, odd), (rows_even, rows_odd) = halves(config.hidden_size), halves(bucket.sequence)
    even_even, even_odd, odd_even, odd_odd = SPECTRAL[config.mixing]  # of the sequence, then of the hidden axis
    elements, t = bucket.tokens * config.hidden_size, bucket.tokens
    ops = [
        elementwise(f"{at}.hidden.fold", elements, passes=4),
        linear(f"{at}.hidden.even", t, even, even, bias=False),
        linear(f"{at}.hidden.odd", t, odd, odd, bias=False),
    ]
    for side, columns, cosines, sines in (("even", even, even_even, odd_even), ("odd", odd, even_odd, odd_odd)):
        part = bucket.batch * columns
        ops.append(elementwise(f"{at}.sequence.{side}.fold", part * bucket.sequence, passes=4))
        if cosines:
            ops.append(linear(f"{at}.sequence.{side}.cosines", part, rows_even, rows_even, bias=False))
        if sines:
            ops.append(linear(f"{at}.sequence.{side}.sines", part, rows_odd, rows_odd, bias=False))
        ops.append(elementwise(f"{at}.sequence.{side}.unfold", part * bucket.sequence, passes=4))
    return [*ops, elementwise(f"{at}.hidden.unfold", elements, passes=4)]


_EXPERT_OPS: Mapping[str, Mapping[str, Callable[[SparseMixerConfig, str, Routing], list[Op]]]] = {
    "moe.dispatch": {"gather": _gather, "one_hot": partial(_one_hot, part="dispatch")},
    "moe.products": {"batched": _batched, "per_expert": _per_expert},
    "moe.combine": {"gather": _gather_back, "scatter": _scatter, "one_hot": partial(_one_hot, part="combine")},
}
