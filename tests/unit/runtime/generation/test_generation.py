"""Generated tokens against transformers' own, alone and in batches whose rows end at different times."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from inspect import GEN_RUNNING, GEN_SUSPENDED
from pathlib import Path

import pytest
from nestforge.errors import InputError
from nestforge.runtime.generation import generation as generation_module
from nestforge.runtime.generation.cached_engine import CachedEngine
from nestforge.runtime.generation.generation import Generation
from nestforge.runtime.generation.pace import Chosen, Pace
from nestforge.runtime.generation.row import Piece, Run
from nestforge.runtime.inputs.arrays import Array
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel

Greedy = Callable[[list[int], int], list[int]]
PROMPTS = [[5, 7, 9], [11, 3, 4, 6, 8, 10, 12], [20], [5, 7, 9, 13], [400, 401, 5]]
TOKENS = 24


def test_greedy_is_what_transformers_generates(model: ElasticModel, greedy: Greedy) -> None:
    row = model.generate(PROMPTS[1], max_tokens=128).rows[0]
    assert list(row.tokens) == greedy(PROMPTS[1], 128)[: len(row.tokens)]
    assert row.finish in ("end", "length")
    assert (row.prompt_tokens, row.reused_tokens) == (7, 0)
    assert len(row.token_ms) == len(row.tokens) - 1
    assert row.runs == (Run("ffn32", len(row.tokens), "no limit asked: the largest submodel"),)


def test_rows_of_a_batch_are_what_each_is_alone(model: ElasticModel, greedy: Greedy) -> None:
    together = model.generate(PROMPTS, max_tokens=TOKENS)
    assert [list(row.tokens) for row in together.rows] == [greedy(prompt, TOKENS) for prompt in PROMPTS]
    assert [row.reused_tokens for row in together.rows] == [0, 0, 0, 3, 0]  # the fourth begins as the first


def test_rows_that_end_leave_and_results_keep_the_order(model: ElasticModel, greedy: Greedy) -> None:
    alone = [greedy(prompt, TOKENS) for prompt in PROMPTS]
    stops = [alone[0][4], alone[2][0], alone[4][9]]
    together = model.generate(PROMPTS, max_tokens=TOKENS, stop=stops)
    for row, whole in zip(together.rows, alone, strict=True):
        end = next((place for place, token in enumerate(whole) if token in stops), TOKENS - 1)
        assert list(row.tokens) == whole[: end + 1]
        assert (row.finish, row.stop) == (("stop", whole[end]) if whole[end] in stops else ("length", None))
    assert len({len(row.tokens) for row in together.rows}) > 2


def test_pieces_are_the_result(model: ElasticModel) -> None:
    generation = model.generate.stream(["class method", "the first argument"], max_tokens=9)
    assert isinstance(generation, Generation)
    pieces = list(generation)
    result = generation.result()
    for number, row in enumerate(result.rows):
        own = [piece for piece in pieces if piece.row == number]
        assert tuple(piece.token for piece in own) == row.tokens
        assert "".join(piece.text for piece in own) == row.text
        assert [piece.finish for piece in own] == [None] * 8 + ["length"]
        assert {piece.submodel for piece in own} == {run.submodel for run in row.runs}


def test_text_ends_before_a_stop_string(model: ElasticModel) -> None:
    whole = model.generate("the value of", max_tokens=12).text
    assert whole
    stop = whole[len(whole) // 2 :][:3]
    row = model.generate("the value of", max_tokens=12, stop=stop).rows[0]
    assert row.text == whole[: whole.index(stop)]
    assert (row.finish, row.stop) == ("stop", stop)


def test_log_probabilities_are_of_the_tokens(model: ElasticModel) -> None:
    row = model.generate([5, 7], max_tokens=6, logprobs=2).rows[0]
    assert row.log_probabilities is not None
    for token, found in zip(row.tokens, row.log_probabilities, strict=True):
        assert found.top[0] == (token, found.token)
        assert found.token < 0


def test_a_seed_repeats_a_text(model: ElasticModel) -> None:
    options = {"max_tokens": 16, "temperature": 1.5, "top_p": 0.9}
    first, again, other = (model.generate([5, 7], seed=seed, **options).rows[0].tokens for seed in (1, 1, 2))
    assert first == again != other


def test_a_closed_generation_gives_what_it_had(model: ElasticModel) -> None:
    with model.generate.stream([5, 7], max_tokens=20) as generation:
        first = [next(generation) for _ in range(3)]
    row = generation.result().rows[0]
    assert row.tokens == tuple(piece.token for piece in first)
    assert row.finish is None
    with pytest.raises(StopIteration):
        next(generation)


def test_a_consumer_that_fails_leaves_the_session_usable(model: ElasticModel, greedy: Greedy) -> None:
    session = model.session()

    def consume() -> None:
        for _ in model.generate.stream(PROMPTS[0], session=session, max_tokens=20):
            if len(session.tokens()) == 8:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    written = list(session.tokens())
    assert written == PROMPTS[0] + greedy(PROMPTS[0], 5)
    row = model.generate([*written, 33], session=session, max_tokens=8).rows[0]
    assert row.reused_tokens == 8
    assert list(row.tokens) == greedy([*written, 33], 8)


def test_a_session_used_by_two_threads_is_refused(model: ElasticModel) -> None:
    session = model.session()
    generation = model.generate.stream([5], session=session, max_tokens=4)
    next(generation)
    refused: list[str] = []

    def beside() -> None:
        try:
            model.generate([5], session=session, max_tokens=4)
        except InputError as failure:
            refused.append(str(failure))

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    assert refused == [
        "session: in use by another thread, MainThread; finish or close its generation, or open a session for each "
        "thread"
    ]
    assert len(list(generation)) == 3
    assert len(model.generate([5], session=session, max_tokens=4).rows[0].tokens) == 4


def test_a_session_is_of_the_thread_that_iterates(model: ElasticModel) -> None:
    session = model.session()
    generation = model.generate.stream([5], session=session, max_tokens=4)
    has_one, may_end = threading.Event(), threading.Event()

    def iterate() -> None:
        next(generation)
        has_one.set()
        may_end.wait(60)

    thread = threading.Thread(target=iterate, name="reader")
    thread.start()
    has_one.wait(60)
    with pytest.raises(InputError, match=r"^session: in use by another thread, reader; finish or close"):
        model.generate([5], session=session, max_tokens=4)
    may_end.set()
    thread.join()
    assert len(model.generate([5], session=session, max_tokens=4).rows[0].tokens) == 4


def test_a_generation_that_another_thread_is_inside_is_refused(
    model: ElasticModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, may_end = threading.Event(), threading.Event()
    real = CachedEngine.step

    def step(self: CachedEngine, tokens: Array, positions: Array) -> Array:
        inside.set()
        may_end.wait(60)
        return real(self, tokens, positions)

    monkeypatch.setattr(CachedEngine, "step", step)
    generation = model.generate.stream([5], max_tokens=4)
    pieces: list[Piece] = []
    thread = threading.Thread(target=lambda: pieces.extend(generation))
    thread.start()
    inside.wait(60)
    line = r"^generation: another thread is generating with it; iterate it in one thread at a time$"
    with pytest.raises(InputError, match=line):
        next(generation)
    with pytest.raises(InputError, match=line):
        generation.close()
    with monkeypatch.context() as patched:  # the other thread comes between the question and the call
        states = iter([GEN_SUSPENDED])
        patched.setattr(generation_module, "getgeneratorstate", lambda _: next(states, GEN_RUNNING))
        with pytest.raises(InputError, match=line):
            next(generation)
    may_end.set()
    thread.join()
    assert [piece.finish for piece in pieces] == [None, None, None, "length"]


def test_a_deadline_counts_the_time_that_it_takes_to_open_submodels(
    llama_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, ...]] = []
    with load(llama_bundle, threads=1) as model:
        real = Pace.for_prompts

        def choose(self: Pace, tokens: int, rows: int, steps: int) -> Chosen:
            found.append(model.generate.open_submodels)
            return real(self, tokens, rows, steps)

        monkeypatch.setattr(Pace, "for_prompts", choose)
        model.generate([5, 7], max_tokens=2, deadline_ms=1e6)
        assert found == [model.generate.open_submodels]
        assert len(found[0]) > 1


def test_a_later_generation_of_the_same_thread_ends_the_one_before(model: ElasticModel) -> None:
    session = model.session()
    before = model.generate.stream([5], session=session, max_tokens=4)
    next(before)
    assert len(model.generate([5], session=session, max_tokens=4).rows[0].tokens) == 4
    with pytest.raises(InputError, match=r"^generation: its session went to a later one of the same thread"):
        next(before)


def test_a_thread_that_ended_has_no_session(model: ElasticModel) -> None:
    session = model.session()
    begun = []

    def begin() -> None:
        begun.append(model.generate.stream([5], session=session, max_tokens=4))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert len(model.generate([5], session=session, max_tokens=4).rows[0].tokens) == 4


def test_a_stream_that_is_left_gives_its_cache_back_at_once(llama_bundle: Path) -> None:
    gc.disable()  # nothing waits for the collector
    try:
        with load(llama_bundle, threads=1, memory_mb=50) as model:
            for _ in range(40):  # 25 caches would take more than the cap
                for piece in model.generate.stream([[5]] * 32, max_tokens=240):
                    assert piece.row == 0
                    break
    finally:
        gc.enable()
