from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bundle.entries.tensor_spec import Role, TensorSpec
from nestforge.errors import InputError
from nestforge.runtime.consistency import tallies as module
from nestforge.runtime.consistency.samples import Batch
from nestforge.runtime.consistency.tallies import DistributionTally, Tally, VectorTally, tally_for

IDS = TensorSpec("ids", "int64", ("batch", "sequence"), pad=0, high=2)
TOKENS = TensorSpec("logits", "float32", ("batch", "sequence", 2))
ROWS = TensorSpec("logits", "float32", ("batch", 3))
HALF, QUARTER = np.log([0.5, 0.5]), np.log([0.25, 0.75])


def batch(lengths: list[int], steps: int, ids: list[list[int]] | None = None, labels: list[int] | None = None) -> Batch:
    rows = len(lengths)
    feeds = {"ids": np.array(ids if ids else np.zeros((rows, steps)), np.int64)}
    counted = np.arange(steps) < np.array(lengths)[:, None]
    return Batch(feeds, rows, counted, None if labels is None else np.array(labels, np.int64))


def means(tally: Tally) -> dict[str, float]:
    return {name: mean.mean for name, mean in tally.figures().items()}


def test_next_tokens_by_hand() -> None:
    """Two texts, of 3 tokens and of 2: three positions foretell a token that is there. One more row is filling."""
    reference = np.array([[HALF, QUARTER, HALF]] * 3, np.float32)
    found = np.array([[HALF, QUARTER[::-1], HALF], [QUARTER, HALF, HALF], [HALF] * 3], np.float32)
    tally = DistributionTally("next_tokens", TOKENS, IDS)
    tally.add(batch([3, 2], 3, ids=[[1, 0, 1], [1, 1, 0]]), reference, found)
    figures = means(tally)
    assert tally.positions == 3
    assert figures["token_agreement"] == pytest.approx(1 / 3)
    # the first text agrees once and then not, the second not at its only position
    assert figures["matched_prefix"] == pytest.approx((1 + 0) / 2)
    # the tokens that follow are 0 and 1 in the first text, 1 in the second
    losses = [-math.log(0.5), -math.log(0.25), -math.log(0.75)]
    assert figures["loss"] == pytest.approx(sum(losses) / 3)
    swapped = 0.75 * math.log(3) + 0.25 * math.log(1 / 3)
    small = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    universal = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert figures["kl_small_to_universal"] == pytest.approx((0 + swapped + small) / 3)
    assert figures["kl_universal_to_small"] == pytest.approx((0 + swapped + universal) / 3)


def test_tokens_count_everywhere_and_foretell_nothing() -> None:
    tally = DistributionTally("tokens", TOKENS, IDS)
    tally.add(batch([2], 3), np.array([[HALF, QUARTER, HALF]]), np.array([[QUARTER, QUARTER, QUARTER]]))
    assert means(tally).keys() == {"token_agreement", "kl_small_to_universal", "kl_universal_to_small"}
    assert means(tally)["token_agreement"] == 0.5
    assert tally.positions == 2


def test_classes_with_labels_by_hand() -> None:
    tally = DistributionTally("classes", ROWS, None)
    reference = np.array([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [9.0, 0.0, 0.0]], np.float32)
    found = np.array([[2.0, 1.0, 0.0], [0.0, 3.0, 2.0], [9.0, 0.0, 0.0]], np.float32)
    tally.add(batch([1, 1], 1, labels=[0, 1]), reference, found)
    figures = means(tally)
    assert (figures["class_agreement"], figures["accuracy"]) == (0.5, 1.0)
    assert figures.keys() == {"class_agreement", "accuracy", "kl_small_to_universal", "kl_universal_to_small"}
    assert tally.positions is None


def test_without_labels_no_accuracy_is_claimed() -> None:
    tally = DistributionTally("classes", ROWS, None)
    tally.add(batch([1], 1), np.zeros((1, 3)), np.zeros((1, 3)))
    assert "accuracy" not in means(tally)


def test_vectors_per_position_are_averaged_over_what_counts() -> None:
    tally = VectorTally(TensorSpec("hidden", "float32", ("batch", "sequence", 2)))
    reference = np.array([[[1.0, 0.0], [3.0, 0.0], [np.nan, 9.0]], [[0.0, 1.0]] * 3])
    found = np.array([[[1.0, 0.0], [1.0, 2.0], [0.0, 9.0]], [[0.0, 5.0]] * 3])
    tally.add(batch([2, 3], 3), reference, found)
    figures = means(tally)
    assert figures["mean_cosine"] == pytest.approx((math.cos(math.pi / 4) + 1) / 2)
    assert figures["recall_at_10"] == 1.0
    assert tally.positions is None


def test_one_vector_has_no_neighbours_to_miss() -> None:
    tally = VectorTally(TensorSpec("x", "float32", ("batch", 2)))
    tally.add(batch([1], 1), np.ones((1, 2)), np.ones((1, 2)))
    assert means(tally) == {"mean_cosine": pytest.approx(1.0), "recall_at_10": 1.0}


@pytest.mark.parametrize("role", ["next_tokens", "tokens", "classes", "embedding"])
@given(seed=st.integers(0, 10**6), at_once=st.integers(1, 40))
def test_a_model_equals_itself(role: Role, seed: int, at_once: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 7, 3).tolist()
    outputs = rng.standard_normal((3, 6, 2)).astype(np.float32)
    tally = tally_for(role, TOKENS, IDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_VALUES_WIDENED_AT_ONCE", at_once)
        tally.add(batch(lengths, 6), outputs, outputs)
    figures = means(tally)
    for name in figures.keys() & {"token_agreement", "class_agreement", "recall_at_10", "mean_cosine"}:
        assert figures[name] == pytest.approx(1.0)
    for name in figures.keys() & {"kl_small_to_universal", "kl_universal_to_small"}:
        assert figures[name] == 0.0
    if role == "next_tokens":
        assert figures["matched_prefix"] == pytest.approx(np.mean([length - 1 for length in lengths]))


@given(seed=st.integers(0, 10**6), at_once=st.integers(1, 40))
def test_figures_do_not_depend_on_batches_or_parts(seed: int, at_once: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, 4).tolist()
    reference, found = rng.standard_normal((2, 4, 6, 2)).astype(np.float32)
    ids = rng.integers(0, 2, (4, 6)).tolist()
    whole, parts = (DistributionTally("next_tokens", TOKENS, IDS) for _ in range(2))
    if max(lengths) < 2:
        lengths[0] = 2
    whole.add(batch(lengths, 6, ids), reference, found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_VALUES_WIDENED_AT_ONCE", at_once)
        for row in range(4):
            parts.add(batch(lengths[row : row + 1], 6, ids[row : row + 1]), reference[row:][:1], found[row:][:1])
    assert means(parts) == {name: pytest.approx(value) for name, value in means(whole).items()}
    assert parts.positions == whole.positions


def test_texts_of_one_token_are_no_language() -> None:
    tally = DistributionTally("next_tokens", TOKENS, IDS)
    tally.add(batch([1, 0], 3), np.zeros((2, 3, 2)), np.zeros((2, 3, 2)))
    with pytest.raises(InputError, match="no sample has a position to compare"):
        tally.figures()


@pytest.mark.parametrize(
    "tally", [DistributionTally("tokens", TOKENS, IDS), VectorTally(TOKENS)], ids=["distribution", "vector"]
)
def test_what_is_not_finite_where_it_counts_is_refused(tally: Tally) -> None:
    outputs = np.zeros((1, 3, 2))
    outputs[0, 2] = np.nan
    tally.add(batch([2], 3), outputs, outputs)
    with pytest.raises(InputError, match="output logits is not finite where it counts"):
        tally.add(batch([3], 3), outputs, outputs)


def test_errors_are_those_of_means_over_samples() -> None:
    """Positions of one text are not independent: of two texts that agree everywhere and nowhere, little is known."""
    tally = DistributionTally("tokens", TOKENS, IDS)
    tally.add(batch([3, 3], 3), np.array([[QUARTER] * 3] * 2), np.array([[QUARTER] * 3, [QUARTER[::-1]] * 3]))
    found = tally.figures()["token_agreement"]
    assert (found.mean, found.error) == (0.5, pytest.approx(0.5))
    vectors = VectorTally(TensorSpec("x", "float32", ("batch", 2)))
    rows = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    vectors.add(batch([1] * 3, 1), rows, rows[[0, 1, 1]])
    cosine = vectors.figures()["mean_cosine"]
    assert cosine.error == pytest.approx(np.std([1, 1, 0], ddof=1) / 3**0.5)
