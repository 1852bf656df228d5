"""The paper's models by name: the three Sparse Mixers, BERT of the same family, and the models of its Tables 1 to 5.

The models of the tables have 12 layers of width 768 where their name says nothing else. ``linear-mixer-4`` attends in
its last four layers; ``-moe6-mixed`` has experts in six, laid out so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from .config import MixingKind, Router, SparseMixerConfig

Layout = Literal["top", "bottom", "middle", "mixed", "mixed-odd"]

# Attending layers of the hybrids in Table 2, at the top.
_ATTENTION_LAYER_COUNTS = (1, 2, 3, 4, 6)
# Widths in Table 3 other than that of Table 2.
_OTHER_WIDTHS = (512, 256, 128)
# Layers with experts in Tables 4 and 5.
_EXPERT_LAYOUTS: tuple[tuple[int, Layout], ...] = (
    (2, "mixed"),
    (4, "mixed"),
    (6, "mixed"),
    (12, "mixed"),
    (6, "bottom"),
    (6, "middle"),
    (6, "mixed-odd"),
    (6, "top"),
)


def placed(layout: Layout, count: int, layers: int) -> tuple[int, ...]:
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
    layers: int,
    width: int,
    mixing: MixingKind,
    attention: int,
    experts: tuple[int, Layout] | None = None,
    router: Router = "experts_choose",
    neurons: int | None = None,
    **more: Any,
) -> SparseMixerConfig:
    """``attention`` layers attend, at the top; ``experts`` says in how many layers there are 16, and in which.
    Dense parts and experts have ``neurons``, by default four times the width."""
    return SparseMixerConfig(
        vocab_size=32_000,
        max_position_embeddings=512,
        type_vocab_size=4,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=neurons or 4 * width,
        mixing=mixing,
        attention_layers=placed("top", attention, layers),
        moe_layers=placed(experts[1], experts[0], layers) if experts else (),
        num_experts=16 if experts else 0,
        router=router,
        head="pretraining",
        num_labels=2,
        **more,
    )


def _sparse_mixers() -> dict[str, SparseMixerConfig]:
    """The chosen models, and those of Table 9, which differ in capacity and group alone."""
    middle: tuple[int, Layout] = (4, "middle")
    return {
        "sparse-mixer-base": _model(14, 512, "linear", 4, middle),
        "fast-sparse-mixer-base": _model(14, 512, "linear", 4, middle, capacity_factor=0.5),
        # The list of the final configuration prints 2056, the ablations and the reference code have 2048.
        "sparse-mixer-base-ff2056": _model(14, 512, "linear", 4, middle, neurons=2056),
        "fast-sparse-mixer-base-ff2056": _model(14, 512, "linear", 4, middle, neurons=2056, capacity_factor=0.5),
        "sparse-mixer-small": _model(8, 512, "linear", 4, middle),
        "sparse-mixer-base-g2048": _model(14, 512, "linear", 4, middle, group_size=2048),
        "sparse-mixer-base-cf75-g2048": _model(14, 512, "linear", 4, middle, group_size=2048, capacity_factor=0.75),
        "bert-base": _model(12, 768, "linear", 12),
    }


def _ablations() -> dict[str, SparseMixerConfig]:
    mixings: tuple[MixingKind, ...] = ("fourier", "hartley", "circulant", "toeplitz", "linear")
    table = {f"{mixing}-mixer": _model(12, 768, mixing, 0) for mixing in mixings}
    hybrids: tuple[MixingKind, ...] = ("hartley", "linear")
    table |= {f"{mixing}-mixer-{k}": _model(12, 768, mixing, k) for mixing in hybrids for k in _ATTENTION_LAYER_COUNTS}
    table |= {f"linear-mixer-4-d{width}": _model(12, width, "linear", 4) for width in _OTHER_WIDTHS}
    table |= {
        f"linear-mixer-4-moe{k}-{layout}": _model(12, 768, "linear", 4, (k, layout)) for k, layout in _EXPERT_LAYOUTS
    }
    routed = _model(12, 768, "linear", 4, (6, "mixed"), "tokens_choose")
    return {**table, "linear-mixer-4-moe6-mixed-tokens-choose": routed}


PRESETS: Mapping[str, SparseMixerConfig] = {**_sparse_mixers(), **_ablations()}
