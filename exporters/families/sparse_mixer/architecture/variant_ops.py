"""What the parts of a Sparse Mixer cost that engines may have in several variants, variant by variant (no torch here).

``moe.dispatch`` and ``moe.combine`` bring tokens to experts and back: ``gather`` by index, ``one_hot`` as a product
with a matrix of zeros and ones, as the reference does; ``scatter`` adds expert by expert to rows of the answer.
``moe.products``: experts ``batched`` over stacked weights, or ``per_expert``. ``mixing`` (spectral alone): ``dense``
products with matrices of cosines and sines, or ``folded`` by their symmetry. static_moe.py and folded_mixing.py have
the modules. The first variant is what figures without a device count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .....bucket import Bucket
from .....elastic import Submodel
from .....workload import Op, added_rows, elementwise, linear, lookup, one_hot_product
from .capacity import Routing, routing
from .config import SPECTRAL, SPECTRAL_FACTORS, SparseMixerConfig, halves

_FLOAT32_BYTES = 4

Variants = dict[str, dict[str, list[Op]]]


def variant_ops(config: SparseMixerConfig, submodel: Submodel, bucket: Bucket) -> Variants:
    """What is computed, to variant, to its operations over all layers; ``bucket`` is the submodel's own.

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


def _gather(config: SparseMixerConfig, at: str, route: Routing) -> list[Op]:
    return [lookup(f"{at}.dispatch", route.slots * config.hidden_size)]


def _one_hot(config: SparseMixerConfig, at: str, route: Routing) -> list[Op]:
    return one_hot_product(f"{at}.dispatch", route.slots, route.tokens, route.groups, config.hidden_size)


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
    asked = 1 if config.router == "tokens_choose" else route.experts
    elements = route.groups * route.tokens * config.hidden_size
    table = elementwise(f"{at}.combine.table", route.slots * config.hidden_size, passes=2)
    read = [lookup(f"{at}.combine.{expert}", elements) for expert in range(asked)]
    return [
        table,
        *read,
        *(elementwise(f"{at}.combine.{expert}.sum", elements, passes=3) for expert in range(1, asked)),
    ]


def _scatter(config: SparseMixerConfig, at: str, route: Routing) -> list[Op]:
    """ONNX Runtime copies the whole answer for every expert."""
    whole = route.groups * route.tokens * config.hidden_size
    elements = route.groups * route.capacity * config.hidden_size
    return [op for expert in range(route.experts) for op in added_rows(f"{at}.combine.{expert}", elements, whole)]


def _one_hot_back(config: SparseMixerConfig, at: str, route: Routing) -> list[Op]:
    return one_hot_product(f"{at}.combine", route.slots, route.tokens, route.groups, config.hidden_size)


def _stacked(name: str, route: Routing, inputs: int, outputs: int) -> Op:
    """One product per expert, over all slots."""
    weights = route.experts * (inputs + 1) * outputs * _FLOAT32_BYTES
    moved = route.slots * (inputs + outputs) * _FLOAT32_BYTES
    return Op(name, "gemm", 2 * route.slots * inputs * outputs, weights, moved)


def _dense(config: SparseMixerConfig, at: str, bucket: Bucket) -> list[Op]:
    """``X [C|S]`` along the hidden axis, then the matching pair along the sequence."""
    pairs, d, n = SPECTRAL[config.mixing], config.hidden_size, bucket.sequence
    return [
        linear(f"{at}.hidden", bucket.tokens, d, pairs * d, bias=False),
        linear(f"{at}.sequence", bucket.batch * d, pairs * n, n, bias=False),
    ]


def _folded(config: SparseMixerConfig, at: str, bucket: Bucket) -> list[Op]:
    """Cosines are even and sines odd: ``x[k] + x[N-k]`` and ``x[k] - x[N-k]`` halve either side of each product."""
    (even, odd), (rows_even, rows_odd) = halves(config.hidden_size), halves(bucket.sequence)
    even_even, even_odd, odd_even, odd_odd = SPECTRAL_FACTORS[config.mixing]  # of the sequence, then of the hidden axis
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
    "moe.dispatch": {"gather": _gather, "one_hot": _one_hot},
    "moe.products": {"batched": _batched, "per_expert": _per_expert},
    "moe.combine": {"gather": _gather_back, "scatter": _scatter, "one_hot": _one_hot_back},
}
