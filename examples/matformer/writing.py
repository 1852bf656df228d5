"""How a bundle of a nested language model writes: every width alone, at a rate, and with drafts; in turns, on the same
prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from ...bundle.manifest import Manifest
from ...runtime.generation.row import GeneratedRow
from ...runtime.model import ElasticModel
from ...tables import Table

PROMPTS = ("import ", "def test_", "class Error(", "    return self.", "for name in ", "raise ValueError(")
DRAFTED = 4
_ROUNDS = 3
_TOKENS = 96
# A rate between those of the largest and the smallest: so much of the way.
_BETWEEN = 0.5


@dataclass(frozen=True)
class Way:
    """One way to write: ``tokens_per_second`` of all prompts, median of the rounds; ``shares`` of the tokens by who
    wrote them; of the tokens that were drafted, the share ``accepted``; and the ``texts``."""

    name: str
    tokens_per_second: float
    shares: Mapping[str, float]
    accepted: float | None
    texts: tuple[str, ...]


def levels_of(manifest: Manifest) -> list[str]:
    """The labels of the trained levels, the largest first."""
    whole = (entry for entry in manifest.largest_first if all(len(set(each)) == 1 for each in entry.values.values()))
    return [entry.labels[0] for entry in whole if entry.labels]


def ways_of_writing(model: ElasticModel, prompts: Sequence[str] = PROMPTS, tokens: int = _TOKENS) -> list[Way]:
    """Every level, a rate between the largest's and the smallest's, and the largest with each draft."""
    levels = levels_of(model.bundle.manifest)
    largest = levels[0]
    ways: dict[str, dict[str, Any]] = {level: {"submodel": level} for level in levels}
    first = _written(model, {name: ways[name] for name in (largest, levels[-1])}, prompts, tokens, rounds=1)
    slow, fast = (way.tokens_per_second for way in first)
    rate = slow + _BETWEEN * max(0.0, fast - slow)
    ways[f"{rate:.0f} tokens a second requested"] = {"tokens_per_second": rate}
    for draft in (*reversed(levels[1:]), "n-gram"):
        ways[f"{largest}, drafted by {draft}"] = {"submodel": largest, "draft": draft, "drafted": DRAFTED}
    ways[f"{largest}, drafted by auto"] = {"submodel": largest, "draft": "auto"}
    return _written(model, ways, prompts, tokens, _ROUNDS)


def ways_table(ways: Sequence[Way], largest: str) -> Table:
    """A row each; speed beside the ``largest`` level's alone, and whether the text is its own."""
    by_name = {way.name: way for way in ways}
    alone = by_name[largest]
    rows = [
        [
            way.name,
            f"{way.tokens_per_second:.0f}",
            f"{way.tokens_per_second / alone.tokens_per_second:.2f}x",
            ", ".join(f"{who} {share:.0%}" for who, share in way.shares.items()),
            "-" if way.accepted is None else f"{way.accepted:.0%}",
            "yes" if way.texts == alone.texts else "no",
        ]
        for way in ways
    ]
    columns = ["who writes", "tokens/s", f"over {largest}", "tokens by", "drafts accepted", f"text of {largest}"]
    return Table(columns, rows)


def agreement(model: ElasticModel, draft: ElasticModel, level: str | None, texts: Sequence[str]) -> float:
    """At how many places of ``texts`` the likeliest next token of ``draft`` (at ``level``, or its largest submodel) is
    that of ``model``'s largest: what a greedy draft is accepted for, one token at a time."""
    same = places = 0
    for text in texts:
        ids = np.array([model.generate.tokens(text)], np.int64)
        feeds = {model.bundle.manifest.inputs[0].name: ids}
        one, other = (
            next(iter(each(feeds, submodel=submodel).outputs.values())).argmax(-1)
            for each, submodel in ((model, None), (draft, level))
        )
        same, places = same + int((one == other).sum()), places + one.size
    return same / places


def _written(
    model: ElasticModel, ways: Mapping[str, Mapping[str, Any]], prompts: Sequence[str], tokens: int, rounds: int
) -> list[Way]:
    """All ``ways`` in turns, so that what else the machine does meets them alike; a first round is not counted."""
    labels = {entry.id: "/".join(entry.labels) or entry.id for entry in model.bundle.manifest.submodels}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    last: dict[str, list[GeneratedRow]] = {}
    for _ in range(rounds + 1):
        for name, options in ways.items():
            rows = [model.generate(prompt, max_tokens=tokens, **options).rows[0] for prompt in prompts]
            rates[name].append(1e3 * sum(len(row.token_ms) for row in rows) / sum(sum(row.token_ms) for row in rows))
            last[name] = rows
    return [_way(name, median(rates[name][1:]), rows, labels) for name, rows in last.items()]


def _way(name: str, rate: float, rows: Sequence[GeneratedRow], labels: Mapping[str, str]) -> Way:
    written: dict[str, int] = {}
    for run in (run for row in rows for run in row.runs):
        written[labels[run.submodel]] = written.get(labels[run.submodel], 0) + run.tokens
    drafts = [draft for row in rows for draft in row.drafts]
    drafted = sum(draft.drafted for draft in drafts)
    return Way(
        name,
        rate,
        {who: count / sum(written.values()) for who, count in written.items()},
        sum(draft.accepted for draft in drafts) / drafted if drafted else None,
        tuple(row.text or "" for row in rows),
    )
