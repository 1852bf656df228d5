"""Texts for the gate of engines that keep a cache, and the pieces in which they are given to them.

No torch here: a plan is held against its graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from ....bundle.entries.generation_entry import WINDOW, GenerationEntry, window_of
from ....bundle.entries.tensor_spec import TensorSpec
from ....exporters.cached_form import MOST_NEW_TOKENS
from .cases import Case

# Tokens of a text; the longest has a piece that takes an engine two runs.
_TOKENS = 48
_LONGEST = MOST_NEW_TOKENS + 9
_MOST_DRAFTED = 8
# A text that is longer than the model's window by so much, where that has at most so many tokens and logits.
_BEYOND, _MOST_WINDOW, _MOST_LOGITS = 3 * _MOST_DRAFTED, 2048, 300_000_000
# Room behind the longest text: an engine must not depend on how much there is.
SPARE = 5
# Tokens that an encoder reads, of one text after the other; those of the longest text are the longest.
_SOURCE_TOKENS = (_TOKENS, 1, 7, 33, 5, 18)


@dataclass(frozen=True)
class Row:
    """A text whose tokens are given in ``pieces`` of so many, with room behind a window for runs of ``longest_run``:
    of few new tokens, so that short texts slide through it. ``again``: after another text of as many, as where somebody
    edits its beginning."""

    case: Case
    pieces: tuple[int, ...]
    longest_run: int = _MOST_DRAFTED
    again: bool = False

    @property
    def ids(self) -> np.ndarray:
        """Its tokens ``[S]`` int64."""
        found: np.ndarray = self.case.feeds["input_ids"][0]
        return found

    @property
    def prompt(self) -> Case:
        """What the encoder before it reads."""
        return Case(self.case.name, {"input_ids": self.case.feeds["source_ids"]})


# Rows that are in one cache; pieces of one token that several have at once are given together.
Batch = tuple[Row, ...]


def judged_specs(entry: GenerationEntry) -> tuple[TensorSpec, ...]:
    """What a text of ``S`` tokens gives: logits, and keys and values of each layer, behind a window of the last tokens
    alone."""
    kept = [
        TensorSpec(
            f"{kind}_{number}",
            "float32",
            ("batch", layer.heads, "sequence" if layer.window is None else WINDOW, layer.size),
        )
        for number, layer in enumerate(entry.layers)
        for kind in ("key", "value")
    ]
    return (TensorSpec("logits", "float32", ("batch", "sequence", entry.vocabulary)), *kept)


def cached_batches(entry: GenerationEntry, long: bool) -> list[Batch]:
    """Texts at random, always the same: whole, in pieces as drafts are verified, token by token, and in rows of
    different length; if ``long``, also one of more tokens than a run takes, where the model has so many positions, and
    one of more than its window has, where that is affordable, which slides within a piece and before a step. Behind an
    encoder each has a prompt of its own length.
    """
    rng, source_rng = np.random.default_rng(entry.vocabulary), np.random.default_rng(entry.vocabulary + 1)
    lengths = cycle(_SOURCE_TOKENS)
    most = min(_TOKENS, entry.positions - SPARE) if entry.positions > SPARE + 1 else entry.positions

    def row(name: str, pieces: Sequence[int], longest_run: int = _MOST_DRAFTED, again: bool = False) -> Row:
        feeds = {"input_ids": rng.integers(0, entry.vocabulary, (1, sum(pieces)))}
        if entry.encoder is not None:
            read = min(_LONGEST if sum(pieces) == _LONGEST else next(lengths), entry.encoder.positions)
            feeds["source_ids"] = source_rng.integers(0, entry.vocabulary, (1, read))
        return Row(Case(name, feeds), tuple(pieces), longest_run, again)

    def single(prompt: int) -> list[int]:
        return [prompt, *[1] * (most - prompt)]

    drafted: list[int] = []
    while sum(drafted) < most:
        drafted.append(min(int(rng.integers(1, _MOST_DRAFTED + 1)), most - sum(drafted)))
    steps = max(1, most // 4)
    prompts = [max(1, most - steps), max(1, most // 5), 1]
    batches = [
        (row("whole", [most], MOST_NEW_TOKENS),),
        (row("in pieces", drafted, again=True),),
        (row("token by token", single(max(1, most // 3))),),
        tuple(row(f"row {number} of {len(prompts)}", [p, *[1] * steps]) for number, p in enumerate(prompts)),
    ]
    if long and most < _LONGEST <= entry.positions - SPARE:
        batches.append((row("longer than a run", [_LONGEST - 2, 1, 1], MOST_NEW_TOKENS),))
    if long and (longest := _beyond_window(entry)) > most:
        batches.append((row("longer than the window", [longest - _MOST_DRAFTED, *[1] * _MOST_DRAFTED]),))
    return batches


def _beyond_window(entry: GenerationEntry) -> int:
    """Tokens of a text that is longer than the model's window; 0 where it has none or a proof would take too long."""
    window = window_of(entry.layers)
    if window is None or window > _MOST_WINDOW:
        return 0
    tokens = min(window + _BEYOND, entry.positions - SPARE)
    return tokens if tokens > window and tokens * entry.vocabulary <= _MOST_LOGITS else 0


def unproven_window(entry: GenerationEntry, batches: Sequence[Batch]) -> str | None:
    """What a receipt says of a model whose window is longer than every text of ``batches``; else None."""
    longest = max(len(row.ids) for batch in batches for row in batch)
    window = window_of(entry.layers)
    if window is None or not longest <= window < entry.positions:
        return None
    return f"no text was longer than its window of {window} tokens"


def cases_of(batches: Sequence[Batch]) -> list[Case]:
    """The text of every row."""
    return [row.case for batch in batches for row in batch]


def prompts_of(batches: Sequence[Batch]) -> list[Case]:
    """What an encoder reads before every row."""
    return [row.prompt for batch in batches for row in batch]
