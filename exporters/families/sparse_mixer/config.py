"""``config.json`` of Sparse Mixer encoders, the slots of their experts, and the paper's models (no torch here).

Token groups and expert capacity are static numbers of an engine, from configuration, submodel and bucket. Groups:
``max(1, floor(tokens / group_size))``, raised until it divides the tokens, so that a group may be larger than
``group_size`` (Sparse Mixers, reference code). Capacity: ``capacity_factor * tokens / experts`` rounded, at least
``min_capacity``, at most the tokens of a group. ``experts`` are all that were trained, whatever a submodel keeps: an
expert then has the slots that it had among all. See docs/sparse-mixer.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, floor
from typing import Any, Literal

from ....bucket import Bucket
from ....elastic import SEQUENCE, Submodel
from ....errors import PlanError
from ...checkpoints.config import MOST_LAYERS, granularity_problem, rising_problem
from ...checkpoints.own_folder import OwnConfig

# Hartley: real minus imaginary part of the DFT with negative exponents, as the reference code has it, or plus, as the
# paper prints it; of the 2-D DFT, or of each axis by itself. Four different functions. With positive exponents plus is
# minus, so each kind is the paper's formula under one sign of the DFT.
LearnedKind = Literal["linear", "circulant", "toeplitz"]
SpectralKind = Literal["fourier", "hartley", "hartley_plus", "hartley_separable", "hartley_separable_plus"]
MixingKind = Literal[LearnedKind, SpectralKind]
# Mixing that learns nothing, to what of the transforms is there: factors of (Cs X Ch, Cs X Sh, Ss X Ch, Ss X Sh); see
# ``spectral_matrices``.
SPECTRAL: Mapping[str, tuple[int, int, int, int]] = {
    "fourier": (1, 0, 0, -1),
    "hartley": (1, 1, 1, -1),
    "hartley_plus": (1, -1, -1, -1),
    "hartley_separable": (1, 1, 1, 1),
    "hartley_separable_plus": (1, -1, -1, 1),
}
# Mixing whose matrices exist for every sequence up to the trained one: a function of the distance, or of the length.
OF_ANY_LENGTH: frozenset[str] = frozenset({"toeplitz", *SPECTRAL})
Router = Literal["experts_choose", "tokens_choose"]
Rounding = Literal["half_even", "floor", "ceil"]
# ``pretraining`` has both heads of the paper's training: masked tokens, and labels of the pooled first position.
Head = Literal["none", "masked_lm", "classifier", "pretraining"]
CAPACITY, GROUP, EXPERTS = "moe.capacity_factor", "moe.group_size", "moe.experts"
# Capacities on offer where config.json does not say, in percent of tokens / experts.
_DEFAULT_CAPACITIES = (25, 50, 75, 100)
_ROUNDINGS: Mapping[str, Callable[[Fraction], int]] = {"half_even": round, "floor": floor, "ceil": ceil}


@dataclass(frozen=True, kw_only=True)
class SparseMixerConfig(OwnConfig):
    """An encoder whose layers mix tokens or attend, and whose feed-forward part is dense or of experts.

    ``attention_layers`` and ``moe_layers`` count from 0, nearest the input, and are chosen independently.
    ``max_position_embeddings`` is the trained sequence. ``intermediate_size`` and ``expert_intermediate_size`` are in
    neurons, ``group_size`` in tokens, ``capacity_factor`` a share of tokens / experts; ``capacity_rounding`` and
    ``min_capacity`` make slots of it (``capacity``). ``capacities`` (percent), ``group_sizes``, ``expert_counts`` and
    ``sequences`` are the smaller budgets that the model is offered at.
    """

    hidden_size: int = field(metadata={"min": 1})
    num_hidden_layers: int = field(metadata={"min": 1, "max": MOST_LAYERS})
    num_attention_heads: int = field(metadata={"min": 1})
    intermediate_size: int = field(metadata={"min": 1})
    vocab_size: int = field(metadata={"min": 1})
    max_position_embeddings: int = field(metadata={"min": 1})
    type_vocab_size: int = field(default=2, metadata={"min": 1})
    embedding_size: int | None = field(default=None, metadata={"min": 1})
    pad_token_id: int = field(default=0, metadata={"min": 0})
    layer_norm_eps: float = 1e-12
    mixing: MixingKind = "linear"
    attention_layers: tuple[int, ...] = ()
    moe_layers: tuple[int, ...] = ()
    num_experts: int = field(default=0, metadata={"min": 0})
    expert_intermediate_size: int | None = field(default=None, metadata={"min": 1})
    router: Router = "experts_choose"
    batch_prioritized: bool = True
    capacity_factor: float = 1.0
    capacity_rounding: Rounding = "half_even"
    min_capacity: int = field(default=4, metadata={"min": 0})
    group_size: int = field(default=4096, metadata={"min": 1})
    head: Head = "none"
    num_labels: int | None = field(default=None, metadata={"min": 2})
    granularities: Mapping[str, tuple[float, ...]] | None = field(default=None, hash=False)
    capacities: tuple[int, ...] | None = None
    group_sizes: tuple[int, ...] | None = None
    expert_counts: tuple[int, ...] | None = None
    sequences: tuple[int, ...] | None = None
    model_type: Literal["sparse_mixer"] = "sparse_mixer"

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def embedding_width(self) -> int:
        """Width of the embedding tables, which are projected to ``hidden_size``."""
        return self.embedding_size or self.hidden_size

    @property
    def expert_width(self) -> int:
        """Neurons of one expert."""
        return self.expert_intermediate_size or self.intermediate_size

    @property
    def predicts_tokens(self) -> bool:
        """Whether there is a head that scores the vocabulary at every position."""
        return self.head in ("masked_lm", "pretraining")

    @property
    def classifies(self) -> bool:
        """Whether there is a head that scores ``num_labels`` labels of the pooled first position."""
        return self.head in ("classifier", "pretraining")

    @property
    def pools(self) -> bool:
        """Whether the first position is pooled."""
        return self.head != "masked_lm"

    @property
    def trained_capacity(self) -> int:
        """The capacity factor in percent."""
        return round(100 * self.capacity_factor)

    @property
    def choices(self) -> dict[str, tuple[int, ...]]:
        """Axis name to the values that it is offered at, rising to the trained one; no axis with one value alone."""
        table: dict[str, tuple[int, ...]] = {}
        if self.moe_layers:
            table[CAPACITY] = _rising(self.capacities or _DEFAULT_CAPACITIES, self.trained_capacity)
            table[GROUP] = _rising(self.group_sizes or (self.max_position_embeddings,), self.group_size)
            if self.router == "experts_choose":  # elsewhere tokens would choose again: another model
                quarters = [max(1, self.num_experts * quarter // 4) for quarter in (1, 2, 3)]
                table[EXPERTS] = _rising(self.expert_counts or quarters, self.num_experts)
        if self.mixing in OF_ANY_LENGTH and self.some_mix:
            n = self.max_position_embeddings
            table[SEQUENCE] = _rising(self.sequences or [max(1, n // part) for part in (4, 2)], n)
        return {name: values for name, values in table.items() if len(values) > 1}

    @property
    def some_mix(self) -> bool:
        """Whether any layer mixes, so that the model is bound to a sequence."""
        return len(self.attention_layers) < self.num_hidden_layers

    def mixes(self, layer: int) -> bool:
        """Whether ``layer`` mixes tokens by fixed matrices; else it attends."""
        return layer not in self.attention_layers

    def routes(self, layer: int) -> bool:
        """Whether the feed-forward part of ``layer`` is made of experts."""
        return layer in self.moe_layers

    def problem(self) -> str | None:
        """First problem among the values, as ``key: problem``, or None."""
        if self.hidden_size % self.num_attention_heads:
            return f"hidden_size: {self.hidden_size} is no multiple of num_attention_heads {self.num_attention_heads}"
        for key in ("attention_layers", "moe_layers"):
            if found := rising_problem(key, getattr(self, key), 0, self.num_hidden_layers - 1):
                return found
        if not 0 < self.layer_norm_eps < 1:
            return f"layer_norm_eps: expected a number between 0 and 1, got {self.layer_norm_eps:g}"
        if self.pad_token_id >= self.vocab_size:
            return f"pad_token_id: {self.pad_token_id} is no token of {self.vocab_size}"
        if self.classifies != (self.num_labels is not None):
            return f"num_labels: expected with head classifier or pretraining, got {self.num_labels} with {self.head}"
        if self.granularities is not None and (found := granularity_problem(self.granularities, list(self.choices))):
            return found
        return self._routing_problem() or self._choices_problem()

    def _routing_problem(self) -> str | None:
        if not self.moe_layers and self.num_experts:
            return f"num_experts: {self.num_experts} experts, but moe_layers is empty"
        if not self.moe_layers:
            same = self.capacity_factor == 1.0
            return None if same else f"capacity_factor: {self.capacity_factor:g}, but moe_layers is empty"
        if self.num_experts < 2:
            return f"num_experts: expected at least 2 for the experts of moe_layers, got {self.num_experts}"
        if not 0.01 <= self.capacity_factor <= self.num_experts:
            return f"capacity_factor: expected 0.01 to {self.num_experts} (the experts), got {self.capacity_factor:g}"
        if abs(100 * self.capacity_factor - self.trained_capacity) > 1e-9:
            return f"capacity_factor: expected whole percents, got {self.capacity_factor!r}"
        return None

    def _choices_problem(self) -> str | None:
        """The offered budgets rise and end at most at what was trained."""
        limits = {
            "capacities": self.trained_capacity,
            "group_sizes": self.group_size,
            "expert_counts": self.num_experts,
            "sequences": self.max_position_embeddings,
        }
        for key, limit in limits.items():
            values = getattr(self, key)
            if values is None:
                continue
            if not values:
                return f"{key}: expected at least one number"
            if found := rising_problem(key, values, 1, limit):
                return found
            if key != "sequences" and not self.moe_layers:
                return f"{key}: the model has no experts"
            if key == "expert_counts" and self.router == "tokens_choose":
                return "expert_counts: with tokens_choose a token whose expert is gone takes another: not this model"
            if key == "sequences" and not self.some_mix:
                return f"sequences: no layer mixes, so that every bucket up to {limit} tokens is served as it is"
            if key == "sequences" and self.mixing not in OF_ANY_LENGTH:
                return f"sequences: {self.mixing} mixing serves {self.max_position_embeddings} tokens alone"
        return None


@dataclass(frozen=True)
class Routing:
    """Static routing of one engine: ``groups`` of ``tokens``, where each of ``experts`` has ``capacity`` slots.

    ``trained_experts`` are the experts that the router scores, ``percent`` is the capacity factor that was requested.
    """

    percent: int
    groups: int
    tokens: int
    capacity: int
    experts: int
    trained_experts: int

    @property
    def slots(self) -> int:
        """Slots of all experts in all groups: what they compute, full or not."""
        return self.groups * self.experts * self.capacity


def routing(config: SparseMixerConfig, submodel: Submodel, bucket: Bucket) -> Routing:
    """The routing of ``submodel`` at ``bucket`` (its own: ``submodel.at(bucket)``). Raises PlanError for no slots."""
    chosen = {axis.name: value for axis, value in submodel.values}
    percent = chosen.get(CAPACITY, config.trained_capacity)
    group_size = chosen.get(GROUP, config.group_size)
    experts = chosen.get(EXPERTS, config.num_experts)
    try:
        return routing_of(config, bucket.tokens, percent, group_size, experts)
    except PlanError as failure:
        raise PlanError(f"bucket {bucket.label}: {failure}; raise {CAPACITY} (`levels`) or the bucket") from failure


def routing_of(config: SparseMixerConfig, tokens: int, percent: int, group_size: int, experts: int) -> Routing:
    """The routing of ``tokens`` in all to the first ``experts``. Raises PlanError for no slots."""
    groups = token_groups(tokens, group_size)
    slots = capacity(config, percent, tokens // groups)
    if slots < 1:
        raise PlanError(
            f"{percent} % of {tokens // groups} tokens over {config.num_experts} experts rounds to 0 slots "
            f"({config.capacity_rounding}, min_capacity {config.min_capacity})"
        )
    return Routing(percent, groups, tokens // groups, slots, experts, config.num_experts)


def token_groups(tokens: int, group_size: int) -> int:
    """How many groups ``tokens`` fall into: the least number from ``tokens // group_size`` on that divides them."""
    groups = max(1, tokens // group_size)
    while tokens % groups:
        groups += 1
    return groups


def capacity(config: SparseMixerConfig, percent: int, tokens: int) -> int:
    """Slots per expert in a group of ``tokens``, at a capacity factor of ``percent``."""
    exact = Fraction(percent * tokens, 100 * config.num_experts)
    return min(max(_ROUNDINGS[config.capacity_rounding](exact), config.min_capacity), tokens)


def parts_of(mixing: str) -> int:
    """Pairs of products of spectral mixing: with cosines and with sines, or one where each axis is transformed by
    itself."""
    cs_ch, cs_sh, ss_ch, ss_sh = SPECTRAL[mixing]
    return 1 if cs_ch * ss_sh == cs_sh * ss_ch else 2


def halves(size: int) -> tuple[int, int]:
    """How many indices up to half of ``size`` an even and an odd function, a cosine and a sine, have values at."""
    return size // 2 + 1, (size - 1) // 2


def _rising(values: Sequence[int], last: int) -> tuple[int, ...]:
    return (*sorted({value for value in values if value < last}), last)


def placed(layout: str, count: int, layers: int) -> tuple[int, ...]:
    """Which of ``layers`` (0 is nearest the input) are the ``count`` that ``layout`` replaces.

    ``mixed`` replaces every ``layers // count``-th from the first on, ``mixed-odd`` from the second on; where that does
    not divide, they are more than ``count``, as in the reference code.
    """
    if not 0 <= count <= layers:
        raise ValueError(f"count: expected 0 to {layers}, got {count}")
    every = range(layers)
    match layout:
        case "top":
            return tuple(every[layers - count :])
        case "bottom":
            return tuple(every[:count])
        case "middle":
            return tuple(layer for layer in every if layers - count <= 2 * layer < layers + count)
    if not count:
        return ()
    step = layers // count
    return tuple(every[(1 % step if layout == "mixed-odd" else 0) :: step])


def _model(
    layers: int, width: int, mixing: str, attention: int, experts: tuple[int, str] | None = None, **own: Any
) -> SparseMixerConfig:
    """``attention`` layers attend, at the top; ``experts`` says in how many layers there are 16, and in which. Dense
    parts and experts have four times the width, but for what is the model's ``own``."""
    shape: dict[str, Any] = {
        "vocab_size": 32_000,
        "max_position_embeddings": 512,
        "type_vocab_size": 4,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
        "mixing": mixing,
        "attention_layers": placed("top", attention, layers),
        "moe_layers": placed(experts[1], experts[0], layers) if experts else (),
        "num_experts": 16 if experts else 0,
        "head": "pretraining",
        "num_labels": 2,
    }
    return SparseMixerConfig(**{**shape, **own})


_MIDDLE = (4, "middle")
# Layers with experts in Tables 4 and 5.
_EXPERT_LAYOUTS = (
    *((count, "mixed") for count in (2, 4, 6, 12)),
    *((6, layout) for layout in ("bottom", "middle", "mixed-odd", "top")),
)
# The paper's models by name: the three Sparse Mixers and those of Table 9, which differ in capacity and group alone;
# BERT of the same family; and those of its Tables 1 to 5, of 12 layers and width 768 where the name says nothing else:
# ``linear-mixer-4`` attends in its last four, ``-moe6-mixed`` has experts in six, laid out so. The list of the final
# configuration prints 2056 neurons (ff2056), the ablations and the reference code have 2048.
PRESETS: Mapping[str, SparseMixerConfig] = {
    "sparse-mixer-base": _model(14, 512, "linear", 4, _MIDDLE),
    "fast-sparse-mixer-base": _model(14, 512, "linear", 4, _MIDDLE, capacity_factor=0.5),
    "sparse-mixer-base-ff2056": _model(14, 512, "linear", 4, _MIDDLE, intermediate_size=2056),
    "fast-sparse-mixer-base-ff2056": _model(14, 512, "linear", 4, _MIDDLE, intermediate_size=2056, capacity_factor=0.5),
    "sparse-mixer-small": _model(8, 512, "linear", 4, _MIDDLE),
    "sparse-mixer-base-g2048": _model(14, 512, "linear", 4, _MIDDLE, group_size=2048),
    "sparse-mixer-base-cf75-g2048": _model(14, 512, "linear", 4, _MIDDLE, group_size=2048, capacity_factor=0.75),
    "bert-base": _model(12, 768, "linear", 12),
    **{f"{kind}-mixer": _model(12, 768, kind, 0) for kind in ("fourier", "hartley", "circulant", "toeplitz", "linear")},
    **{f"{kind}-mixer-{n}": _model(12, 768, kind, n) for kind in ("hartley", "linear") for n in (1, 2, 3, 4, 6)},
    **{f"linear-mixer-4-d{width}": _model(12, width, "linear", 4) for width in (512, 256, 128)},
    **{f"linear-mixer-4-moe{n}-{at}": _model(12, 768, "linear", 4, (n, at)) for n, at in _EXPERT_LAYOUTS},
    "linear-mixer-4-moe6-mixed-tokens-choose": _model(12, 768, "linear", 4, (6, "mixed"), router="tokens_choose"),
}
