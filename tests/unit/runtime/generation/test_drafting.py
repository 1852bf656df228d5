"""Texts that are drafted are the target's own, token for token or in distribution, and leave its own cache behind."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.errors import SelectionError
from nestforge.runtime.generation import drafting
from nestforge.runtime.generation.cached_engine import CachedEngine
from nestforge.runtime.generation.draft_gains import StepTimes
from nestforge.runtime.generation.row import GeneratedRow, Piece, Row
from nestforge.runtime.generation.sampling import Sampler, Sampling
from nestforge.runtime.inputs.arrays import Array
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.chi_square import chi_square
from support.gated_decoders import make_decoder, save_decoder
from support.tiny_models import edit_config

Greedy = Callable[[list[int], int], list[int]]
TOKENS = 40
# Two logits that differ by less may come in either order of a step and of a check, which add up in another order.
NEAR_TIE = 1e-4
TWINS = 8


@pytest.fixture(scope="module")
def twins_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 2 with soft caps and a window of three tokens, whose neurons from the ninth on do nothing: its smallest
    submodel computes what the largest does."""
    folder = tmp_path_factory.mktemp("twins")
    model = make_decoder("gemma2", head_dim=8, max_position_embeddings=64)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data[:, TWINS:] = 0
    model.save_pretrained(folder / "model")
    edit_config(folder / "model", nested=True)
    options: dict[str, Any] = {"buckets": [Bucket(1, 16)], "submodels": [f"ffn{TWINS}"], "include": "budgets"}
    return nestforge.compile(
        folder / "model", "raspberry-pi-5", folder / "bundle", generate=True, measure=False, **options
    )


@pytest.fixture
def twins(twins_bundle: Path) -> Iterator[ElasticModel]:
    with load(twins_bundle, threads=1) as opened:
        yield opened


def prompts(vocabulary: int, count: int, most: int) -> list[list[int]]:
    """Random ones, each with a part that it has twice."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        ids = rng.integers(3, vocabulary, rng.integers(1, most // 2)).tolist()
        found.append([*ids, *ids[: rng.integers(1, len(ids) + 1)]])
    return found


def require_same(plain: GeneratedRow, drafted: GeneratedRow) -> None:
    """The texts are one; or differ first where the two most likely logits are nearer than NEAR_TIE."""
    if plain.tokens == drafted.tokens:
        return
    first = next(at for at, (a, b) in enumerate(zip(plain.tokens, drafted.tokens, strict=False)) if a != b)
    (_, largest), (_, second) = plain.log_probabilities[first].top
    assert largest - second < NEAR_TIE, f"differ at token {first}: {plain.tokens} and {drafted.tokens}"


@pytest.mark.parametrize("draft", ["S", "ffn24", "n-gram"])
def test_greedy_is_the_targets_own(model: ElasticModel, draft: str) -> None:
    for prompt in prompts(512, 8, 24):
        plain = model.generate(prompt, max_tokens=TOKENS, logprobs=2).rows[0]
        for count in (1, 3, 9):
            row = model.generate(prompt, max_tokens=TOKENS, draft=draft, drafted=count).rows[0]
            require_same(plain, row)


def test_greedy_of_integers_is_the_same_drafted_and_in_company(tmp_path: Path) -> None:
    """Tokens that are checked in one run, and rows that step together, have scales of their own."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "max_position_embeddings": 64}
    save_decoder(tmp_path / "model", "llama", **sizes)
    options: dict[str, Any] = {"buckets": [Bucket(1, 16)], "levels": {"ffn": (1.0,)}, "precisions": ["int8-dynamic"]}
    path = nestforge.compile(
        tmp_path / "model", "raspberry-pi-5", tmp_path / "b", generate=True, measure=False, **options
    )
    given = prompts(48, 6, 20)
    with load(path, threads=1) as opened:
        alone = [opened.generate(prompt, max_tokens=TOKENS, logprobs=2).rows[0] for prompt in given]
        together = opened.generate(given, max_tokens=TOKENS).rows
        for plain, other, prompt in zip(alone, together, given, strict=True):
            require_same(plain, other)
            require_same(plain, opened.generate(prompt, max_tokens=TOKENS, draft="n-gram", drafted=5).rows[0])


@pytest.mark.parametrize("draft", [f"ffn{TWINS}", "n-gram"])
def test_greedy_is_the_targets_own_with_a_window(twins: ElasticModel, draft: str) -> None:
    for prompt in prompts(48, 12, 20):
        plain = twins.generate(prompt, max_tokens=TOKENS, logprobs=2).rows[0]
        row = twins.generate(prompt, max_tokens=TOKENS, draft=draft, drafted=5).rows[0]
        require_same(plain, row)


def test_auto_is_the_targets_own(model: ElasticModel) -> None:
    for prompt in prompts(512, 6, 24):
        plain = model.generate(prompt, max_tokens=TOKENS, logprobs=2).rows[0]
        require_same(plain, model.generate(prompt, max_tokens=TOKENS, draft="auto").rows[0])


def run_times(monkeypatch: pytest.MonkeyPatch, steps_ms: dict[str, float], check_ms: float) -> None:
    """Records of StepTimes for every step and check."""
    monkeypatch.setattr(StepTimes, "is_known", lambda *_: True)
    monkeypatch.setattr(StepTimes, "expected_ms", lambda _, engine, rows: steps_ms[engine.submodel])
    monkeypatch.setattr(StepTimes, "expected_checks_ms", lambda _, engine, most: [10.0] + [check_ms] * (most - 1))


def test_auto_drafts_where_it_pays_and_says_so(twins: ElasticModel, monkeypatch: pytest.MonkeyPatch) -> None:
    run_times(monkeypatch, {"ffn32": 10.0, f"ffn{TWINS}": 1.0}, check_ms=12.0)
    row = twins.generate([5, 7], max_tokens=40, draft="auto", drafted=3, stop=[]).rows[0]
    by_draft = {one.draft: one for one in row.drafts}
    twin = by_draft[f"ffn{TWINS}"]
    assert twin.accepted == twin.drafted > 0
    reasons = [run.reason for run in row.runs]
    before = "no limit given: the largest submodel; draft auto"
    assert reasons[0] == before
    assert reasons[-1].startswith(f"{before}: ffn{TWINS} drafts; expected times as fast as steps: ffn{TWINS} ")


def test_auto_is_off_where_nothing_pays_and_says_so(twins: ElasticModel, monkeypatch: pytest.MonkeyPatch) -> None:
    run_times(monkeypatch, {"ffn32": 10.0, f"ffn{TWINS}": 9.0}, check_ms=40.0)
    row = twins.generate([5, 7], max_tokens=20, draft="auto", stop=[]).rows[0]
    assert row.drafts == ()
    assert row.runs[-1].reason == (
        "no limit given: the largest submodel; draft auto: nothing drafted; expected times as fast as steps: "
        f"ffn{TWINS} 0.38"
    )


def test_auto_says_what_is_expected_of_every_draft(model: ElasticModel, monkeypatch: pytest.MonkeyPatch) -> None:
    run_times(monkeypatch, {"ffn32": 10.0, "ffn16": 8.0, "ffn8": 7.0}, check_ms=40.0)
    monkeypatch.setattr(drafting, "_likely", lambda smaller, target: smaller[1:])
    row = model.generate([5, 7], max_tokens=20, draft="auto", stop=[]).rows[0]
    before, figures = row.runs[-1].reason.split("; expected times as fast as steps: ")
    assert before == "no limit given: the largest submodel; draft auto: nothing drafted"
    named = dict(figure.split() for figure in figures.split(", "))
    assert named.keys() - {"n-gram"} == {"ffn8", "ffn16"}
    assert sorted(map(float, named.values()), reverse=True) == [float(factor) for factor in named.values()]


def test_auto_writes_without_the_drafts_that_the_memory_cap_has_no_room_for(llama_bundle: Path) -> None:
    """Beside a generation that is under way nothing is closed to make room."""
    with load(llama_bundle, memory_mb=7, threads=1) as model:
        small = model.session(capacity=128)
        with model.generate.stream([5, 7], max_tokens=8) as other:
            next(other)
            kept = []
            for rows, capacity in ((32, 256), (2, 256), (1, 2)):
                with contextlib.suppress(SelectionError):
                    while True:
                        kept.append(model.session(rows, capacity))
            few = [kept.pop() for _ in range(3)]
            for session in few:
                session.close()  # room for the logits of a check
            assert model.generate.open_submodels == ("ffn32",)
            with pytest.raises(SelectionError, match=r"^memory_mb=7: engine ffn8\.cached\S+ as \w+ takes \S+ MB more"):
                model.generate([5, 7], session=small, max_tokens=20, draft="ffn8")
            row = model.generate([5, 7], session=small, max_tokens=20, draft="auto", stop=[]).rows[0]
            assert "; draft auto without ffn8, for which the memory cap has no room" in row.runs[-1].reason
            assert {one.draft for one in row.drafts} <= {"n-gram"}
            kept += [model.session(capacity=2) for _ in few]
            row = model.generate([5, 7], session=small, max_tokens=20, draft="auto", stop=[]).rows[0]
        assert len(row.tokens) == 20
        assert row.drafts == ()
        assert row.runs[-1].reason.endswith(
            "; draft auto: nothing drafted, the memory cap has no room for the logits of checks"
        )


def test_checks_of_every_number_of_tokens_return_into_one_buffer(
    model: ElasticModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = []
    real = CachedEngine.check

    def check(self: CachedEngine, *arguments: Any) -> Array:
        logits = real(self, *arguments)
        engines.append(self)
        assert logits.base is not None
        assert np.shares_memory(logits, self._check_logits)
        return logits

    monkeypatch.setattr(CachedEngine, "check", check)
    for most in (3, 40):
        model.generate([5, 7], max_tokens=40, draft="S", drafted=most, stop=[])
    assert len(engines[-1]._check_logits[0]) == 39  # the last of 40 tokens is not drafted
    assert len(engines[-1]._checks) <= 16


def test_the_answer_says_what_was_drafted(model: ElasticModel) -> None:
    row = model.generate([5, 7, 9], max_tokens=TOKENS, draft="S", drafted=3).rows[0]
    (run,) = row.runs
    assert (run.submodel, run.tokens) == ("ffn32", TOKENS)
    assert run.reason == "no limit given: the largest submodel; drafted by ffn8, at most 3 a run"
    (drafts,) = row.drafts
    assert drafts.draft == "ffn8"
    assert 0 < drafts.accepted < drafts.drafted <= 3 * drafts.runs
    # The prompt gives one token; a run those that it accepts and one more, the last perhaps none more.
    assert len(row.tokens) - 1 - drafts.runs - drafts.accepted in (0, 1)
    assert len(row.token_ms) == len(row.tokens) - 1


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 2.0, "top_k": 8, "seed": 3}])
def test_a_draft_that_computes_what_the_target_does_is_accepted_whole(
    twins: ElasticModel, options: dict[str, Any]
) -> None:
    for prompt in prompts(48, 4, 16):
        row = twins.generate(prompt, max_tokens=13, draft=f"ffn{TWINS}", drafted=3, stop=[], **options).rows[0]
        (drafts,) = row.drafts
        assert drafts.accepted == drafts.drafted
        if row.finish == "length":
            assert (drafts.runs, drafts.drafted) == (3, 9)


def test_drawn_texts_have_the_targets_distribution(model: ElasticModel) -> None:
    prompt, options = [7, 9, 11], {"temperature": 1.5, "top_k": 3, "min_p": 0.05}
    drawn, drafted, accepted = [], 0, 0
    for seed in range(1200):
        row = model.generate(prompt, max_tokens=3, draft="S", drafted=2, seed=seed, **options).rows[0]
        drawn.append(row.tokens)
        drafted += sum(one.drafted for one in row.drafts)
        accepted += sum(one.accepted for one in row.drafts)
    assert 100 < accepted < drafted - 100
    exact = exact_texts(model, prompt, 3, options)
    assert len(exact) > 8
    statistic, limit = chi_square(drawn, exact)
    assert statistic < limit


def exact_texts(
    model: ElasticModel, prompt: list[int], tokens: int, options: dict[str, Any]
) -> dict[tuple[int, ...], float]:
    """The probability of every text behind ``prompt``, by the logits of whole passes."""
    sampler, (end,) = Sampler(Sampling(**options)), model.bundle.manifest.generation.end_ids
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in found.items():
            if text and text[-1] == end:
                longer[text] = probability
                continue
            ids = np.array([[*prompt, *text]])
            logits = np.asarray(model({"input_ids": ids}).outputs["logits"])[0, ids.shape[1] - 1]
            each = sampler.probabilities(logits, ids[0])
            longer |= {(*text, int(token)): probability * each[token] for token in np.flatnonzero(each)}
        found = longer
    return found


def test_pieces_are_the_result(model: ElasticModel) -> None:
    generation = model.generate.stream("class method", max_tokens=20, draft="ffn24", logprobs=1)
    pieces: list[Piece] = list(generation)
    row = generation.result().rows[0]
    assert tuple(piece.token for piece in pieces) == row.tokens
    assert "".join(piece.text for piece in pieces) == row.text
    assert [piece.finish for piece in pieces] == [None] * 19 + ["length"]
    plain = model.generate("class method", max_tokens=20, logprobs=1).rows[0]
    assert row.log_probabilities is not None
    assert plain.log_probabilities is not None
    ours, theirs = ([found.token for found in of] for of in (row.log_probabilities, plain.log_probabilities))
    assert ours == pytest.approx(theirs, abs=1e-4)


def test_a_row_ends_in_the_middle_of_what_was_drafted(twins: ElasticModel) -> None:
    whole = twins.generate([5, 7], max_tokens=20, stop=[]).rows[0].tokens
    for end in range(1, 12):
        session = twins.session(capacity=40)
        options: dict[str, Any] = {"session": session, "draft": f"ffn{TWINS}", "drafted": 4}
        stop = whole[end]
        first = whole.index(stop)
        row = twins.generate([5, 7], max_tokens=20, stop=stop, **options).rows[0]
        assert (row.tokens, row.stop) == (whole[: first + 1], stop)
        assert session.tokens() == (5, 7, *row.tokens[:-1])  # the last one counts as not fed, as without a draft
        row = twins.generate([5, 7], max_tokens=end, **options).rows[0]
        assert row.tokens == whole[:end]
        assert session.tokens() == (5, 7, *row.tokens[:-1])


def test_a_capacity_that_just_fits_is_enough(model: ElasticModel, greedy: Greedy) -> None:
    for draft in ("S", "n-gram"):
        row = model.generate([5, 7], max_tokens=30, capacity=32, draft=draft, drafted=9).rows[0]
        assert list(row.tokens) == greedy([5, 7], 30)


def test_the_cache_is_the_targets(model: ElasticModel, greedy: Greedy) -> None:
    drafted, plain = model.session(capacity=64), model.session(capacity=64)
    for session, draft in ((drafted, "S"), (plain, None)):
        model.generate([5, 7, 9], session=session, max_tokens=30, draft=draft)
    assert drafted.tokens() == plain.tokens()
    for ours, theirs in zip(drafted._cache.tensors, plain._cache.tensors, strict=True):
        np.testing.assert_allclose(ours[:, :, :32], theirs[:, :, :32], atol=1e-5)
    # A submodel that is named reuses what it wrote itself.
    turn = [*drafted.tokens(), 40, 41]
    row = model.generate(turn, session=drafted, max_tokens=6, submodel="ffn32").rows[0]
    assert row.reused_tokens == 32
    assert list(row.tokens) == greedy(turn, 6)


@pytest.mark.parametrize("method", ["check", "step"])
def test_an_interrupted_run_leaves_what_the_target_wrote(
    model: ElasticModel, greedy: Greedy, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    session = model.session()
    real, runs = getattr(CachedEngine, method), []

    def interrupted(self: CachedEngine, *arguments: Any) -> Array:
        logits: Array = real(self, *arguments)  # the keys are written, and nobody is told
        runs.append(1)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return logits

    generation = model.generate.stream([5, 7, 9], session=session, max_tokens=20, draft="ffn24", drafted=3)
    with monkeypatch.context() as patched:
        patched.setattr(CachedEngine, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(generation)
    row = generation.result().rows[0]
    assert list(row.tokens) == greedy([5, 7, 9], 20)[: len(row.tokens)]
    assert session.tokens() == (5, 7, 9, *row.tokens[:-1])
    again = model.generate([5, 7, 9], session=session, max_tokens=20, draft="ffn24").rows[0]
    assert list(again.tokens) == greedy([5, 7, 9], 20)


def test_a_stream_that_is_closed_leaves_the_tokens_of_its_last_run(model: ElasticModel, greedy: Greedy) -> None:
    session = model.session()
    with model.generate.stream([5, 7, 9], session=session, max_tokens=20, draft="ffn24") as generation:
        for _ in range(4):
            next(generation)
    row = generation.result().rows[0]
    assert len(row.tokens) >= 4
    assert list(row.tokens) == greedy([5, 7, 9], len(row.tokens))
    assert session.tokens() == (5, 7, 9, *row.tokens[:-1])


def test_no_more_is_drafted_than_may_be_picked(model: ElasticModel, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted: list[tuple[int, int]] = []
    real = Row.draft

    def draft(self: Row, logits: Array, ahead: int) -> Any:
        drafted.append((self.tokens_left, ahead))
        return real(self, logits, ahead)

    monkeypatch.setattr(Row, "draft", draft)
    assert len(model.generate([5], max_tokens=1, draft="S").rows[0].tokens) == 1
    assert model.generate([5], max_tokens=7, draft="S", drafted=9).rows[0].finish == "length"
    assert drafted
    assert all(ahead < left - 1 for left, ahead in drafted)
