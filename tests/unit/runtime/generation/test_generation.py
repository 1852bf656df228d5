"""Generated tokens against transformers' own, alone and in batches whose rows end at different times."""

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import GEN_RUNNING, GEN_SUSPENDED
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.errors import InputError
from nestforge.runtime.generation import generation as generation_module
from nestforge.runtime.generation.cached_engine import CachedEngine
from nestforge.runtime.generation.generation import Generation
from nestforge.runtime.generation.pace import Chosen, Pace
from nestforge.runtime.generation.row import Piece, Row, RowOptions, Run
from nestforge.runtime.generation.sampling import Sampling
from nestforge.runtime.generation.text_stream import Stops
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
    assert row.runs == (Run("ffn32", len(row.tokens), "no limit given: the largest submodel"),)


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


@pytest.mark.parametrize("draft", [None, "n-gram"])
def test_text_ends_before_a_stop_string(model: ElasticModel, draft: str | None) -> None:
    whole = model.generate("the value of", max_tokens=16).text
    assert whole
    stop = whole[len(whole) // 2 :][:3]
    row = model.generate("the value of", max_tokens=16, stop=stop, draft=draft).rows[0]
    assert (row.text, row.finish, row.stop) == (whole[: whole.index(stop)], "stop", stop)


def test_log_probabilities_are_of_the_tokens(model: ElasticModel) -> None:
    row = model.generate([5, 7], max_tokens=6, logprobs=2).rows[0]
    assert row.log_probabilities is not None
    for token, found in zip(row.tokens, row.log_probabilities, strict=True):
        assert found.top[0] == (token, found.token)
        assert found.token < 0


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"draft": "S"}])
def test_a_seed_repeats_a_text(model: ElasticModel, options: dict[str, Any]) -> None:
    options = {"max_tokens": 16, "temperature": 1.5, **options}
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
    with ThreadPoolExecutor(1) as beside, pytest.raises(InputError) as refused:
        beside.submit(model.generate, [5], session=session, max_tokens=4).result()
    assert str(refused.value) == (
        "session: in use by another thread, MainThread; finish or close its generation, or open a session for each "
        "thread"
    )
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
    with ThreadPoolExecutor(1) as thread:
        _begun = thread.submit(model.generate.stream, [5], session=session, max_tokens=4)
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


LARGE = EngineEntry("large", "large", Bucket(1, 1), "onnxruntime", "large.onnx", "sliced", 0, 0, 0, 0)
SMALL = replace(LARGE, id="small", submodel="small")


def test_suppressed_tokens_are_as_unlikely_as_can_be() -> None:
    logits = np.arange(4, dtype=np.float32)
    options = RowOptions(5, Sampling(), Stops(), frozenset(), suppressed=(3,), suppressed_first=(2,))
    behind_forced = replace(options, first=1)
    assert options.allowed(logits, 0).tolist() == [0, 1, -np.inf, -np.inf]
    assert options.allowed(logits, 1).tolist() == [0, 1, 2, -np.inf]
    assert behind_forced.allowed(logits, 1).tolist() == [0, 1, -np.inf, -np.inf]
    assert OPTIONS.allowed(logits, 0) is logits
    assert logits.tolist() == [0, 1, 2, 3]


OPTIONS = RowOptions(5, Sampling(), Stops(frozenset([2, 3])), frozenset([2]))


def row(options: RowOptions = OPTIONS) -> Row:
    return Row(0, np.array([7, 8]), options, tokenizer=None)


def likely(token: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    logits = np.zeros(9, np.float32)
    logits[token] = 1
    return logits


def test_a_row_ends_with_its_largest_number_of_tokens() -> None:
    own, chosen = row(), Chosen(LARGE, "requested")
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
        assert own.pick(likely(token), Chosen(LARGE, "requested")).finish == finish
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
    chosen = Chosen(LARGE, "requested")
    assert [own.pick(logits, chosen).token for _ in range(3)] == [5, 4, 7]
