"""Tokens that a session holds to be in its cache, and does not compute again."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import InputError, SelectionError
from nestforge.runtime.generation import cached_engine
from nestforge.runtime.generation.session import CachedTokens, Ids
from nestforge.runtime.inputs.arrays import Array
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel

Greedy = Callable[[list[int], int], list[int]]
# Submodels of 4 heads in both of its layers, of 2, and of 1 and 4.
ELASTIC_HEADS = Path(__file__).parents[3] / "golden" / "bundle-fewer-heads"
WHOLE, FEWER, UNLIKE = "ffn32-heads4", "ffn16-heads2", "ffn8x1_32x1-heads1x1_4x1"


def test_a_turn_continues_the_one_before(model: ElasticModel, greedy: Greedy) -> None:
    with model.session(capacity=64) as session:
        assert (session.rows, session.capacity, session.bytes) == (1, 64, 2 * 2 * 2 * 8 * 64 * 4)
        first = list(model.generate([5, 7, 9], session=session, max_tokens=6).rows[0].tokens)
        assert list(session.tokens()) == [5, 7, 9, *first[:-1]]  # the last one was not fed
        turn = [5, 7, 9, *first, 40, 41]
        row = model.generate(turn, session=session, max_tokens=6).rows[0]
        assert (row.prompt_tokens, row.reused_tokens) == (11, 8)
        assert list(row.tokens) == greedy(turn, 6)


def test_what_follows_the_common_prefix_is_overwritten(model: ElasticModel, greedy: Greedy) -> None:
    session = model.session()
    model.generate([5, 7, 9, 11, 13, 15], session=session, max_tokens=12)
    row = model.generate([5, 7, 30, 31], session=session, max_tokens=12).rows[0]
    assert row.reused_tokens == 2
    assert list(row.tokens) == greedy([5, 7, 30, 31], 12)
    again = model.generate([5, 7], session=session, max_tokens=12).rows[0]
    assert again.reused_tokens == 1  # the logits of the last one are requested
    assert list(again.tokens) == greedy([5, 7], 12)


def test_a_submodel_asked_for_by_name_reuses_only_what_it_wrote(model: ElasticModel) -> None:
    largest, *_, smallest = [entry.id for entry in model.bundle.manifest.largest_first]
    prompt = [5, 7, 9, 11, 13, 15, 17, 19]
    alone = model.generate(prompt, submodel=smallest, max_tokens=12, logprobs=0).rows[0]
    session = model.session()
    first = model.generate(prompt, submodel=largest, session=session, max_tokens=4).rows[0]
    row = model.generate(prompt, submodel=smallest, session=session, max_tokens=12, logprobs=0).rows[0]
    assert row.reused_tokens == 0
    assert (row.tokens, row.log_probabilities) == (alone.tokens, alone.log_probabilities)
    assert model.generate(prompt, submodel=smallest, session=session, max_tokens=2).rows[0].reused_tokens == 7
    mixed = model.generate([*prompt[:4], *first.tokens], session=session, max_tokens=2).rows[0]
    assert mixed.reused_tokens >= 4, "where no submodel is named, what any wrote is used"


def test_rows_keep_their_numbers_when_others_end(model: ElasticModel, greedy: Greedy) -> None:
    session = model.session(rows=3)
    prompts = [[5, 7, 9], [20, 21], [30, 31, 32]]
    stop = greedy(prompts[0], 1)
    rows = model.generate(prompts, session=session, max_tokens=7, stop=stop).rows
    assert len(rows[0].tokens) == 1
    for number, prompt in enumerate(prompts):
        assert list(session.tokens(number)) == [*prompt, *rows[number].tokens[:-1]]
    turns = [[*prompt, *row.tokens, 50] for prompt, row in zip(prompts, rows, strict=True)]
    for turn, row in zip(turns, model.generate(turns, session=session, max_tokens=7).rows, strict=True):
        assert row.reused_tokens == row.prompt_tokens - 2
        assert list(row.tokens) == greedy(turn, 7)


def test_an_interrupted_run_is_computed_again(
    model: ElasticModel, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = model.session()
    real, steps = cached_engine.CachedEngine.step, []

    def step(self: cached_engine.CachedEngine, *arguments: Array) -> Array:
        logits = real(self, *arguments)  # the keys are written, and nobody is told
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return logits

    with monkeypatch.context() as patched:
        patched.setattr(cached_engine.CachedEngine, "step", step)
        with pytest.raises(KeyboardInterrupt):
            model.generate([5, 7, 9], session=session, max_tokens=20)
    assert list(session.tokens()) == [5, 7, 9, *greedy([5, 7, 9], 3)]
    assert list(model.generate([5, 7, 9], session=session, max_tokens=20).rows[0].tokens) == greedy([5, 7, 9], 20)


def test_an_interrupted_prompt_is_computed_again(
    model: ElasticModel, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = model.session()
    model.generate([5, 7, 9, 11], session=session, max_tokens=3)

    def extend(*_: Array) -> Array:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(cached_engine.CachedEngine, "extend", extend)
        with pytest.raises(KeyboardInterrupt):
            model.generate([5, 7, 30, 31], session=session, max_tokens=3)
    assert session.tokens() == (5, 7)
    assert list(model.generate([5, 7, 9, 11], session=session, max_tokens=9).rows[0].tokens) == greedy([5, 7, 9, 11], 9)


def test_a_session_of_another_model_is_refused(model: ElasticModel, llama_bundle: Path) -> None:
    with load(llama_bundle, threads=1) as other, pytest.raises(InputError, match=r"^session: of another model; open"):
        model.generate([5], session=other.session())


def test_submodels_continue_each_other(model: ElasticModel) -> None:
    session = model.session()
    first = model.generate([5, 7, 9], session=session, max_tokens=4, submodel="ffn8").rows[0]
    row = model.generate([5, 7, 9, *first.tokens], session=session, max_tokens=4).rows[0]
    assert (first.runs[0].submodel, row.runs[0].submodel) == ("ffn8", "ffn32")
    assert row.reused_tokens == 6


def test_a_closed_session_is_refused(model: ElasticModel) -> None:
    session = model.session()
    with pytest.raises(InputError, match=r"^session: expected a row from 0 to 0, got 1$"):
        session.tokens(1)
    session.close()
    session.close()
    assert session.bytes == 0
    with pytest.raises(InputError, match=r"^session: closed; open another one$"):
        session.tokens()
    with pytest.raises(InputError, match=r"^session: closed; open another one$"):
        model.generate([5], session=session)


@pytest.mark.parametrize(
    ("rows", "capacity", "line"),
    [
        (0, None, "rows: expected a whole number, 1 or above, got 0"),
        (65, None, "rows: expected at most 64, which the engines take at once, got 65"),
        (1, 257, "capacity: expected at most 256, the positions of this model, got 257"),
        (1, 1.5, "capacity: expected a whole number, 2 or above, got 1.5"),
    ],
)
def test_sizes_that_cannot_be_are_refused(model: ElasticModel, rows: int, capacity: int | None, line: str) -> None:
    with pytest.raises(InputError) as raised:
        model.session(rows, capacity)
    assert str(raised.value) == line


def test_sessions_count_under_the_memory_cap(llama_bundle: Path) -> None:
    with load(llama_bundle, memory_mb=4, threads=1) as model:
        session = model.session(rows=4, capacity=256)  # 262 kB, and logits of four engines
        line = r"^memory_mb=4: a cache and buffers of 4\.\d MB leave nothing for engines beside what is open; close a"
        with pytest.raises(SelectionError, match=line):
            model.session(rows=64, capacity=256)
        session.close()
        assert len(model.generate([5], max_tokens=3).rows[0].tokens) == 3


def test_a_call_that_fails_gives_its_cache_back_at_once(llama_bundle: Path) -> None:
    with load(llama_bundle, memory_mb=5.5, threads=1) as model:
        with pytest.raises(SelectionError, match=r"^no submodel 'ffn7'") as refused:
            model.generate([[5]] * 40, capacity=256, submodel="ffn7")  # 2.6 MB
        assert model.session(rows=40, capacity=256).rows == 40
        assert refused.tb is not None, "the trace of the error still has the first one"


@pytest.fixture(scope="module")
def of_heads() -> Iterator[ElasticModel]:
    with load(ELASTIC_HEADS, threads=1) as opened:
        yield opened


def alone(model: ElasticModel, submodel: str, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """A submodel's text behind each prompt in a session of its own."""
    return [model.generate(prompt, submodel=submodel, max_tokens=6).rows[0].tokens for prompt in prompts]


def test_fewer_heads_continue_what_more_wrote_and_not_the_other_way(of_heads: ElasticModel) -> None:
    """The prompt is read with all heads, what follows written with fewer; the next turn has no keys of the rest."""
    prompt = [3, 1, 4, 1, 5]
    with of_heads.session() as session:
        row = of_heads.generate(prompt, session=session, tokens_per_second=1e9, max_tokens=6).rows[0]
        assert [run.submodel for run in row.runs] == [WHOLE, FEWER]
        turn = [*prompt, *row.tokens, 9]
        row = of_heads.generate(turn, session=session, max_tokens=6).rows[0]
        assert row.reused_tokens == len(prompt)
        assert [row.tokens] == alone(of_heads, WHOLE, [turn])


def test_every_row_is_laid_out_for_the_heads_of_who_writes(of_heads: ElasticModel) -> None:
    prompts = [[3, 1, 4, 1, 5], [7, 8], [9]]
    with of_heads.session(rows=3) as session:
        for submodel in (WHOLE, FEWER, UNLIKE, WHOLE):
            rows = of_heads.generate(prompts, session=session, submodel=submodel, max_tokens=6).rows
            assert [row.tokens for row in rows] == alone(of_heads, submodel, prompts)
            assert [row.reused_tokens for row in rows] == [0, 0, 0]
            again = of_heads.generate(prompts, session=session, submodel=submodel, max_tokens=6).rows
            assert [row.tokens for row in again] == [row.tokens for row in rows]
            assert [row.reused_tokens for row in again] == [4, 1, 0]
        one = of_heads.generate(prompts[0], session=session, submodel=FEWER, max_tokens=6).rows[0]
        assert [one.tokens] == alone(of_heads, FEWER, prompts[:1])
        assert session.tokens(1) == (*prompts[1], *rows[1].tokens[:-1]), "one row reads the first heads where they lie"


def test_rows_that_step_together_are_written_by_one_number_of_heads(of_heads: ElasticModel) -> None:
    rows = of_heads.generate([[3, 1], [7]], tokens_per_second=1e9, max_tokens=4).rows
    assert {run.submodel for row in rows for run in row.runs} == {WHOLE}
    assert "of several rows only submodels with its heads, 2 left out" in rows[0].runs[0].reason


def test_a_draft_of_fewer_heads_reads_the_first_of_the_targets(of_heads: ElasticModel) -> None:
    prompt = [3, 1, 4, 1, 5]
    plain = alone(of_heads, WHOLE, [prompt])
    for draft in (FEWER, UNLIKE, "auto"):
        assert [of_heads.generate(prompt, draft=draft, max_tokens=6).rows[0].tokens] == plain
    with pytest.raises(
        SelectionError,
        match=r"checks \(heads of its size, and no layer with more, or it could not read its cache\): t",
    ):
        of_heads.generate(prompt, submodel=UNLIKE, draft=FEWER)


GOLDEN = Path(__file__).parents[3] / "golden" / "bundle-fewer-heads"


@pytest.fixture(scope="module")
def engines() -> tuple[EngineEntry, EngineEntry]:
    """Submodels of all heads, and of fewer."""
    generation = open_bundle(GOLDEN).manifest.generation
    whole = next(engine for engine in generation.engines if engine.kind.cache_heads is None)
    return whole, next(engine for engine in generation.engines if engine.kind.cache_heads == (2, 2))


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.int64)


def test_tokens_are_there_once_they_are_valid(engines: tuple[EngineEntry, EngineEntry]) -> None:
    written = CachedTokens(2, 8)
    written.put(0, 0, ids(5, 6), engines[0])
    assert written.at(0) == ()
    written.lengths[0] = 2
    written.extend([7, 9], engines[0])
    assert (written.at(0), written.at(1)) == ((5, 6, 7), (9,))
    written.forget()
    assert (written.at(0), written.at(1)) == ((), ())


def test_an_engine_reads_what_was_written_with_its_heads_or_more(engines: tuple[EngineEntry, EngineEntry]) -> None:
    whole, fewer = engines
    written = CachedTokens(1, 8)
    assert written.common(ids(1, 2), whole) == [0]
    written.put(0, 0, ids(1, 2), whole)
    written.put(0, 2, ids(3), fewer)
    written.lengths[0] = 3
    assert written.common(ids(1, 2, 3, 4), fewer) == [3]
    assert written.common(ids(1, 2, 3, 4), whole) == [2]
    assert written.common(ids(1, 7), whole) == [1]
    assert written.common(ids(1, 2, 3), fewer, own=True) == [0]
    assert written.common(ids(1, 2, 3), whole, own=True) == [2]
    other = replace(whole, id="another")
    assert (written.common(ids(1, 2), other), written.common(ids(1, 2), other, own=True)) == ([2], [0])


def test_places_are_copied_and_exchanged(engines: tuple[EngineEntry, EngineEntry]) -> None:
    whole, fewer = engines
    written = CachedTokens(2, 4)
    written.put(0, 0, ids(1, 2, 3), fewer)
    written.copy(0, 1, 2)
    written.lengths[1] = 2
    assert written.at(1) == (1, 2)
    assert written.common(ids(1, 2), whole) == [0, 0]
    written.put(0, 0, ids(8), whole)
    written.swap(0, 1)
    written.lengths[0], written.lengths[1] = 2, 1
    assert (written.at(0), written.at(1)) == ((1, 2), (8,))
    assert written.common(ids(8), whole) == [0, 1]
