"""Drafted tokens are kept or replaced so that what comes out has the checking submodel's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from nestforge.runtime.generation.rejection import Drafted, draw_draft, pick_checked
from nestforge.runtime.generation.sampling import Logits, Sampler, Sampling
from support.chi_square import chi_square_limit, chi_square_statistic

VOCABULARY, DRAFTED, TEXTS = 4, 2, 4000
PROMPT = np.array([0])
_RNG = np.random.default_rng(0)
# By the last token: what each submodel computes behind it.
TARGET, DRAFT = (_RNG.normal(0, 1.5, (VOCABULARY, VOCABULARY)).astype(np.float32) for _ in range(2))
OPTIONS = [
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
@pytest.mark.parametrize("sampling", OPTIONS, ids=str)
def test_texts_are_distributed_as_the_targets_own(sampling: Sampling, draft: Logits | None) -> None:
    expected = exactly(sampling)
    statistic, cells = chi_square_statistic(texts(sampling, draft), expected)
    assert statistic < chi_square_limit(cells - 1)


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
    statistic, cells = chi_square_statistic(kept, exactly(sampling))
    assert statistic > 10 * chi_square_limit(cells - 1)


@pytest.mark.parametrize("sampling", [Sampling(), *OPTIONS], ids=str)
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
