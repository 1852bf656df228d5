"""Tokens picked from logits, against the logits processors of transformers and against what is documented."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.errors import InputError
from nestforge.runtime.generation.sampling import (
    Drafted,
    Logits,
    Sampler,
    Sampling,
    draw_draft,
    log_probabilities,
    pick_checked,
)
from support.chi_square import chi_square
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

NONE = np.zeros(0, np.int64)
OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 0.7},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.5, "top_k": 10_000},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 3.0, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 1.7, "top_k": 200, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05},
]


def logits_of(seed: int, size: int = 1000) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (np.random.default_rng(seed).standard_normal(size) * 4).astype(np.float32)


def of_transformers(sampling: Sampling, logits: Any, history: Any) -> Any:
    """The distribution that ``GenerationMixin`` would draw from: its processors in its order."""
    steps = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        steps.append(MinPLogitsWarper(sampling.min_p))
    scores = steps(torch.from_numpy(history)[None], torch.from_numpy(logits.copy())[None])
    return torch.softmax(scores, dim=-1)[0].numpy()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_distribution_is_that_of_transformers(options: dict[str, Any]) -> None:
    sampling = Sampling(**options)
    for seed in range(20):
        logits = logits_of(seed)
        history = np.random.default_rng(seed).integers(0, 1000, 60)  # some ids repeat
        logits[[3, 4]] = -np.inf, np.sort(logits)[-5]  # a masked token, and equal ones
        before = logits.copy()
        ours = Sampler(sampling).probabilities(logits, history)
        theirs = of_transformers(sampling, logits, history)
        assert (ours.dtype, ours.shape) == (np.float64, (1000,))
        assert np.array_equal(ours > 0, theirs > 0)
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-30)
        assert math.isclose(ours.sum(), 1, rel_tol=1e-12)
        assert np.array_equal(logits, before), "the caller's logits changed"


def test_the_penalty_counts_prompt_and_repeats_once_and_decides_greedy() -> None:
    logits = np.array([2.0, 3.0, -1.0, 1.9], np.float32)
    penalised = Sampler(Sampling(repetition_penalty=2.0))
    assert penalised.pick(logits, NONE) == 1
    assert penalised.pick(logits, np.array([1, 1, 1, 2])) == 0  # 3 / 2, and not 3 / 8
    assert penalised.pick(logits, np.array([0, 1])) == 3
    drawn = Sampler(Sampling(temperature=1, repetition_penalty=2.0)).probabilities(logits, np.array([2, 1, 1]))
    assert np.allclose(np.log(drawn / drawn[0]), [0, -0.5, -4, -0.1], atol=1e-6)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.1}, {"min_p": 1}, {"top_k": 2, "seed": 9}])
def test_greedy_takes_the_lowest_of_equal_ids_whatever_the_filters(filters: dict[str, Any]) -> None:
    logits = np.array([1, 5, 5, -np.inf, 5], np.float32)
    sampler = Sampler(Sampling(**filters))
    assert [sampler.pick(logits, NONE) for _ in range(3)] == [1, 1, 1]
    assert sampler.probabilities(logits, NONE).tolist() == [0, 1, 0, 0, 0]
    assert sampler.uniform() == Sampler(Sampling(**filters)).uniform(), "greedy used chance"


def test_of_equal_tokens_top_k_keeps_all_and_top_p_the_lowest_ids() -> None:
    logits = np.array([0, 1, 0, 0, 0], np.float32)
    kept = Sampler(Sampling(temperature=1, top_k=2)).probabilities(logits, NONE)
    assert (kept > 0).all()
    nucleus = math.e / (math.e + 4) + 1.5 / (math.e + 4)  # the likeliest and one and a half of the others
    kept = Sampler(Sampling(temperature=1, top_p=nucleus)).probabilities(logits, NONE)
    assert np.flatnonzero(kept).tolist() == [0, 1, 2]
    alike = Sampler(Sampling(temperature=1, top_p=0.5)).probabilities(np.zeros(8, np.float32), NONE)
    assert alike.tolist() == [0.25] * 4 + [0] * 4


def test_the_stream_is_the_documented_one() -> None:
    """Written out once more from the definition, and as numbers: numpy promises them for every platform."""
    sampler = Sampler(Sampling(temperature=1, seed=2026), row=3)
    raw = np.random.PCG64(np.random.SeedSequence(2026, spawn_key=(3,)))
    expected = [float(Fraction(int(raw.random_raw()) >> 11, 2**53)) for _ in range(5)]
    assert [sampler.uniform() for _ in range(5)] == expected
    logits = logits_of(1)
    sums = np.cumsum(Sampler(Sampling(temperature=1)).probabilities(logits, NONE))
    again = Sampler(Sampling(temperature=1, seed=2026), row=3)
    assert [again.pick(logits, NONE) for _ in range(5)] == [int((sums <= u * sums[-1]).sum()) for u in expected]


def test_picks_are_the_same_everywhere() -> None:
    logits = (np.arange(64) % 7).astype(np.float32)
    sampler = Sampler(Sampling(temperature=2, seed=7), row=1)
    assert [sampler.pick(logits, NONE) for _ in range(12)] == [32, 5, 14, 11, 6, 26, 24, 55, 26, 6, 6, 20]
    first = [Sampler(Sampling(seed=seed), row).uniform() for seed, row in [(0, 0), (0, 1), (2**63 - 1, 2)]]
    assert first == [0.9429375528828794, 0.6771968569751019, 0.9001030492851332]


def test_rows_and_seeds_have_streams_of_their_own() -> None:
    first = {(seed, row): Sampler(Sampling(seed=seed), row).uniform() for seed in range(30) for row in range(30)}
    first |= {(2**32 + seed, 0): Sampler(Sampling(seed=2**32 + seed)).uniform() for seed in range(30)}
    assert len(set(first.values())) == len(first)


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    temperature=st.sampled_from([5e-324, 1e-300, 0.2, 1.0, 50.0, 1.7e308]),
    top_k=st.integers(0, 5),
    top_p=st.sampled_from([5e-324, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 5e-324, 0.3, 1.0]),
    penalty=st.sampled_from([1e-6, 1.1, 1e6]),
    seed=st.integers(0, 2**63 - 1),
)
def test_pick_draws_from_probabilities(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, seed: int
) -> None:
    row = np.array(logits, np.float32)
    sampling = Sampling(temperature, top_k, top_p, min_p, penalty, seed)
    picking, drawing = Sampler(sampling), Sampler(sampling)
    history = np.arange(len(row))[::2]
    for _ in range(5):
        probabilities = drawing.probabilities(row, history)
        token = picking.pick(row, history)
        assert token == drawing.draw(probabilities)
        assert probabilities[token] > 0


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_no_uniform_draws_a_token_without_probability(monkeypatch: pytest.MonkeyPatch, uniform: float) -> None:
    monkeypatch.setattr(Sampler, "uniform", lambda self: uniform)
    for seed in range(200):
        weights = np.random.default_rng(seed).random(9) * np.array([0, 1, 0, 1, 1, 0, 1, 0, 0])
        assert Sampler(Sampling()).draw(weights) == (6 if uniform else 1)


def test_log_probabilities_are_of_the_model_itself() -> None:
    logits = logits_of(5)
    logits[7] = -np.inf
    theirs = torch.log_softmax(torch.from_numpy(logits).double(), dim=0)
    found = log_probabilities(logits, 11, top=4)
    assert math.isclose(found.token, theirs[11], rel_tol=1e-12)
    values, ids = theirs.topk(4)
    assert [i for i, _ in found.top] == ids.tolist()
    assert np.allclose([value for _, value in found.top], values, rtol=1e-12)
    assert log_probabilities(logits, 11).top == ()
    assert log_probabilities(logits, 7).token == -math.inf


def test_of_equal_log_probabilities_the_lowest_ids_come_first() -> None:
    found = log_probabilities(np.array([1, 2, 1, 3, 1], np.float32), 0, top=3)
    assert [i for i, _ in found.top] == [3, 1, 0]
    assert len(log_probabilities(np.zeros(3, np.float32), 0, top=9).top) == 3
    assert math.isclose(log_probabilities(np.zeros(3, np.float32), 2).token, -math.log(3))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    logits = np.array([0, value, -1], np.float32)
    for sampling in (Sampling(), Sampling(temperature=1)):
        with pytest.raises(InputError, match=rf"^row 2: expected finite logits, the largest is {value}: the engine"):
            Sampler(sampling, row=2).pick(logits, NONE)
        with pytest.raises(InputError, match="expected finite logits"):
            Sampler(sampling).probabilities(np.full(3, -np.inf, np.float32), NONE)


def test_numbers_of_numpy_are_taken() -> None:
    taken = Sampling(np.float32(0.5), np.int64(3), 1, 0, np.float64(2), np.uint8(4))
    assert taken == Sampling(0.5, 3, 1.0, 0.0, 2.0, 4)
    assert [type(value) for value in vars(taken).values()] == [float, int, float, float, float, int]
    assert (Sampling().greedy, taken.greedy) == (True, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature: expected a number, 0 or above, got -0.1"),
        ({"top_k": 2.0}, r"top_k: expected .*, got 2.0"),
        ({"top_p": 0}, r"top_p: expected a number above 0, at most 1, got 0"),
        ({"min_p": None}, r"min_p: expected a number from 0 to 1, got None"),
        ({"repetition_penalty": 0}, r"repetition_penalty: expected a number from 1e-06 to 1000000, got 0"),
        ({"repetition_penalty": 1e300}, r"repetition_penalty: expected .*, got 1e\+300"),
        ({"seed": 2**63}, r"seed: expected a whole number from 0 to 9\S+, got 9223372036854775808"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        Sampling(**options)


VOCABULARY, DRAFTED, TEXTS = 4, 2, 4000
PROMPT = np.array([0])
_RNG = np.random.default_rng(0)
# By the last token: what each submodel computes behind it.
TARGET, DRAFT = (_RNG.normal(0, 1.5, (VOCABULARY, VOCABULARY)).astype(np.float32) for _ in range(2))
SAMPLINGS = [
    Sampling(temperature=1),
    Sampling(temperature=1.7, top_k=3),
    Sampling(temperature=0.8, top_p=0.85),
    Sampling(temperature=1.3, min_p=0.2, repetition_penalty=1.4),
]


def texts(sampling: Sampling, draft: Logits | None) -> list[tuple[int, ...]]:
    """Many of three tokens, two of them drafted; by ``draft``, or by always proposing token 1."""
    found = []
    for number in range(TEXTS):
        sampler = Sampler(sampling, number)
        history, drafted = PROMPT, []
        for _ in range(DRAFTED):
            one = Drafted(1) if draft is None else draw_draft(sampler, draft[history[-1]], history)
            drafted.append(one)
            history = np.append(history, one.token)
        history = PROMPT
        for one in drafted:
            token = pick_checked(sampler, TARGET[history[-1]], history, one)
            history = np.append(history, token)
            if token != one.token:
                break
        while len(history) < len(PROMPT) + DRAFTED + 1:
            history = np.append(history, sampler.pick(TARGET[history[-1]], history))
        found.append(tuple(history[1:].tolist()))
    return found


def exactly(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The probability of each text of three tokens that the target alone would write."""
    sampler = Sampler(sampling)
    found = {}
    for text in product(range(VOCABULARY), repeat=DRAFTED + 1):
        history, probability = PROMPT, 1.0
        for token in text:
            probability *= float(sampler.probabilities(TARGET[history[-1]], history)[token])
            history = np.append(history, token)
        found[text] = probability
    return found


@pytest.mark.parametrize("draft", [DRAFT, None], ids=["another distribution", "one token"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_texts_are_distributed_as_the_targets_own(sampling: Sampling, draft: Logits | None) -> None:
    statistic, limit = chi_square(texts(sampling, draft), exactly(sampling))
    assert statistic < limit


def test_a_wrong_rule_is_seen() -> None:
    """Drafts that are always kept have the draft's distribution, which the test above would refuse."""
    sampling = Sampling(temperature=1)
    kept = []
    for number in range(TEXTS):
        sampler = Sampler(sampling, number)
        history = PROMPT
        for _ in range(DRAFTED + 1):
            history = np.append(history, draw_draft(sampler, DRAFT[history[-1]], history).token)
        kept.append(tuple(history[1:].tolist()))
    statistic, limit = chi_square(kept, exactly(sampling))
    assert statistic > 10 * limit


@pytest.mark.parametrize("sampling", [Sampling(), *SAMPLINGS], ids=str)
def test_a_draft_that_is_the_target_is_always_kept(sampling: Sampling) -> None:
    for number in range(300):
        sampler = Sampler(sampling, number)
        drafted = draw_draft(sampler, TARGET[number % VOCABULARY], PROMPT)
        assert pick_checked(sampler, TARGET[number % VOCABULARY], PROMPT, drafted) == drafted.token


def test_greedy_keeps_the_most_likely_token_alone_and_draws_nothing() -> None:
    sampler = Sampler(Sampling())
    for token in range(VOCABULARY):
        assert pick_checked(sampler, TARGET[2], PROMPT, Drafted(token)) == int(TARGET[2].argmax())
    assert sampler.uniform() == Sampler(Sampling()).uniform()


def test_a_token_that_is_not_kept_does_not_come_back() -> None:
    sampler = Sampler(Sampling(temperature=1, top_k=2))
    unlikely = int(TARGET[1].argmin())
    found: Sequence[int] = [pick_checked(sampler, TARGET[1], PROMPT, Drafted(unlikely)) for _ in range(200)]
    assert unlikely not in found
    assert len(set(found)) == 2
