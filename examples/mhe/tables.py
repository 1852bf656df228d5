"""The paper's comparison at the size of the demonstration: quality beside parameters, forms beside their latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp

from ...runtime.summary import Table

BEST, LEAST = "mha", "sha"  # what PRR and PEoP are measured by
CAVEAT = (
    "PRR is the share of mha's score that is kept; PEoP is the relative gain over sha for each per cent of parameters "
    "of attention added to sha's. It explodes where few are added, as by mhe_add and mhe_mul: it ranks nothing."
)


@dataclass(frozen=True)
class Trained:
    """A kind of attention: parameters of its sublayers without (``qkv``) and with output projections, and the
    ``score``, an accuracy or a perplexity."""

    kind: str
    qkv: int
    attention: int
    score: float


@dataclass(frozen=True)
class Timed:
    """A kind in one form: ``milliseconds`` of one row, and bytes of weights that its engine reads."""

    kind: str
    form: str
    milliseconds: float
    weight_bytes: int


@dataclass(frozen=True)
class Writing:
    """A decoder with a KV cache: bytes of it for each token, and ``milliseconds`` a token."""

    kind: str
    cache_bytes: int
    milliseconds: float


def retained(score: float, best: float, is_perplexity: bool) -> float:
    """PRR (section 5.1): the share of ``best``, mha's score, that is kept; of a perplexity, what it is not above it."""
    return 1 - (score - best) / best if is_perplexity else score / best


def elasticity(one: Trained, least: Trained, is_perplexity: bool) -> float | None:
    """PEoP (section 5.1) of ``one`` over ``least``, sha; None where it adds no parameters."""
    added = one.attention / least.attention - 1
    gain = one.score / least.score - 1
    return None if added == 0 else (-gain if is_perplexity else gain) / added


def quality_table(found: Sequence[Trained], is_perplexity: bool) -> Table:
    """A row for each kind."""
    by_kind = {one.kind: one for one in found}
    score = "perplexity of a byte" if is_perplexity else "accuracy of hidden bytes"
    rows = []
    for one in found:
        gain = elasticity(one, by_kind[LEAST], is_perplexity)
        rows.append(
            [
                one.kind,
                f"{one.qkv:,}",
                f"{one.attention:,}",
                f"{one.score:.3f}" if is_perplexity else f"{one.score:.2%}",
                f"{retained(one.score, by_kind[BEST].score, is_perplexity):.1%}",
                "-" if gain is None else f"{gain:.3f}",
            ]
        )
    return Table(["attention", "parameters of q, k, v", "with output", score, "PRR", "PEoP"], rows)


def forms_table(found: Sequence[Timed], chosen: Mapping[str, str]) -> Table:
    """A row for each form of each kind; ``chosen`` is the form that a compile for this host takes, by kind."""
    base = {one.kind: one.milliseconds for one in found if one.form == "literal"}
    rows = [
        [
            one.kind,
            one.form,
            f"{one.milliseconds:.3f}",
            f"{base[one.kind] / one.milliseconds:.2f}x" if one.kind in base else "-",
            f"{one.weight_bytes / 1e6:.2f}",
            "yes" if chosen.get(one.kind, one.form) == one.form else "",
        ]
        for one in found
    ]
    return Table(["attention", "form", "ms a row", "over literal", "weights MB", "chosen here"], rows)


def writing_table(found: Sequence[Writing]) -> Table:
    """A row for each kind, beside mha's cache."""
    base = next(one.cache_bytes for one in found if one.kind == BEST)
    rows = [
        [one.kind, f"{one.cache_bytes:,}", f"{base / one.cache_bytes:g}x less", f"{one.milliseconds:.3f}"]
        for one in found
    ]
    return Table(["attention", "cache bytes a token", "than mha", "ms a token"], rows)


def perplexity(loss: float) -> float:
    """Perplexity of a ``loss`` in nats."""
    return exp(loss)
