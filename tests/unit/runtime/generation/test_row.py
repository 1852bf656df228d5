"""One row, picked from logits that are given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.runtime.generation.pace import Chosen
from nestforge.runtime.generation.row import Row, RowOptions, Run
from nestforge.runtime.generation.sampling import Sampling
from nestforge.runtime.generation.text_stream import Stops

LARGE = EngineEntry("large", "large", Bucket(1, 1), "onnxruntime", "large.onnx", "sliced", 0, 0, 0, 0)
SMALL = replace(LARGE, id="small", submodel="small")
OPTIONS = RowOptions(5, Sampling(), Stops(frozenset([2, 3])), frozenset([2]))


def row(options: RowOptions = OPTIONS) -> Row:
    return Row(0, np.array([7, 8]), options, tokenizer=None)


def likely(token: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    logits = np.zeros(9, np.float32)
    logits[token] = 1
    return logits


def test_a_row_ends_with_its_largest_number_of_tokens() -> None:
    own, chosen = row(), Chosen(LARGE, "asked for")
    finishes = [own.pick(likely(token), chosen).finish for token in (4, 5, 6, 5, 4)]
    assert finishes == [None] * 4 + ["length"]
    assert own.tokens_left == 0
    assert own.last == 4
    result = own.result()
    assert (result.tokens, result.text, result.stop) == ((4, 5, 6, 5, 4), None, None)
    assert result.tokens_per_second is None  # nobody counted the time of a step


def test_the_models_own_end_is_told_from_a_stop() -> None:
    for token, finish in ((2, "end"), (3, "stop")):
        own = row()
        assert own.pick(likely(token), Chosen(LARGE, "asked for")).finish == finish
        assert (own.result().tokens, own.result().stop) == ((token,), token)


def test_runs_change_with_the_writer_or_its_reason() -> None:
    own, large, late = row(), Chosen(LARGE, "in time"), Chosen(SMALL, "too late")
    for chosen in (large, large, Chosen(SMALL, "in time"), late, late):
        own.pick(likely(4), chosen)
    assert own.result().runs == (
        Run("large", 2, "in time"),
        Run("small", 1, "in time"),
        Run("small", 2, "too late"),
    )


def test_a_penalty_counts_the_prompt_and_what_was_picked() -> None:
    own = row(replace(OPTIONS, sampling=Sampling(repetition_penalty=2.0)))
    logits = np.array([0, 0, 0, 0, 1.0, 1.2, 0, 1.5, 0], np.float32)  # 7 is in the prompt
    chosen = Chosen(LARGE, "asked for")
    assert [own.pick(logits, chosen).token for _ in range(3)] == [5, 4, 7]
