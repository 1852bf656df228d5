import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from nestforge.bundle.entries.tensor_spec import Role, TensorSpec
from nestforge.errors import InputError
from nestforge.runtime.consistency import tallies as module
from nestforge.runtime.consistency.samples import Batch
from nestforge.runtime.consistency.tallies import (
    DistributionTally,
    SampleMean,
    Tally,
    VectorTally,
    cosines,
    kl_divergence,
    log_softmax,
    mean_over,
    prefix_length,
    recalls_at,
    same_choice,
    tally_for,
)

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


def test_vectors_per_position_are_averaged_over_what_counts() -> None:
    tally = VectorTally(TensorSpec("hidden", "float32", ("batch", "sequence", 2)))
    reference = np.array([[[1.0, 0.0], [3.0, 0.0], [np.nan, 9.0]], [[0.0, 1.0]] * 3])
    found = np.array([[[1.0, 0.0], [1.0, 2.0], [0.0, 9.0]], [[0.0, 5.0]] * 3])
    tally.add(batch([2, 3], 3), reference, found)
    figures = means(tally)
    assert figures["mean_cosine"] == pytest.approx((math.cos(math.pi / 4) + 1) / 2)
    assert figures["recall_at_10"] == 1.0
    assert tally.positions is None


def test_neighbours_are_also_those_of_the_first_numbers() -> None:
    tally = VectorTally(TensorSpec("x", "float32", ("batch", 3), dimensions=(3, 2)))
    rows = np.random.default_rng(0).standard_normal((14, 3))
    tally.add(batch([1] * 14, 1), rows, rows)
    shares = recalls_at(rows, rows[:, :2], 10)
    assert means(tally)["recall_at_10"] == 1.0
    assert means(tally)["recall_at_10_in_2"] == pytest.approx(shares.mean())
    assert 0 < shares.mean() < 1


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


LOGITS = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 4), st.integers(2, 9)), elements=st.floats(-1e4, 1e4, width=32)
)


def test_log_softmax_by_hand() -> None:
    found = log_softmax(np.array([[0.0, math.log(3.0)]], np.float32))
    assert found.dtype == np.float64
    np.testing.assert_allclose(np.exp(found), [[0.25, 0.75]], rtol=1e-7)


def test_logits_of_any_size_neither_overflow_nor_vanish() -> None:
    found = log_softmax(np.array([[3e38, -3e38, 3e38], [-3e38, -3e38, -3e38]], np.float32))
    np.testing.assert_allclose(found[0, [0, 2]], -math.log(2))
    assert found[0, 1] < -1e38
    np.testing.assert_allclose(found[1], -math.log(3))


def test_kl_of_known_distributions_in_both_directions() -> None:
    """KL(P||Q) of P = (1/2, 1/2) and Q = (1/4, 3/4): 1/2 log 2 + 1/2 log 2/3; backwards 1/4 log 1/2 + 3/4 log 3/2."""
    p, q = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    assert kl_divergence(p, q)[0] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert kl_divergence(q, p)[0] == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))


def test_what_never_happens_adds_nothing() -> None:
    p = log_softmax(np.array([[0.0, -1e5]]))
    q = log_softmax(np.array([[0.0, 0.0]]))
    assert kl_divergence(p, q)[0] == pytest.approx(math.log(2))
    assert kl_divergence(q, p)[0] == pytest.approx(0.5 * math.log(0.5) + 0.5 * (math.log(0.5) + 1e5))


@given(LOGITS, st.integers(0, 10**6))
def test_kl_is_never_negative_and_nothing_from_itself(logits: np.ndarray, seed: int) -> None:
    other = np.random.default_rng(seed).permuted(logits, axis=-1)
    p, q = log_softmax(logits), log_softmax(other)
    assert (kl_divergence(p, q) >= 0).all()
    assert (kl_divergence(p, p) == 0).all()
    np.testing.assert_allclose(np.exp(p).sum(-1), 1.0)


@given(LOGITS, st.floats(-100, 100))
def test_a_shift_of_all_logits_changes_nothing(logits: np.ndarray, shift: float) -> None:
    wide = logits.astype(np.float64)
    np.testing.assert_allclose(log_softmax(wide + shift), log_softmax(wide), atol=1e-9)


def test_equal_logits_choose_the_first() -> None:
    reference = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 2.0, 2.0]])
    found = np.array([[5.0, 0.0, 5.0], [0.0, 5.0, 5.0], [0.0, 9.0, 0.0]])
    assert same_choice(reference, found).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("same", "length"), [([], 0), ([False, True], 0), ([True, True, False, True], 2), ([True, True], 2)]
)
def test_prefix_ends_at_the_first_difference(same: list[bool], length: int) -> None:
    assert prefix_length(np.array(same, bool)) == length


def test_of_one_value_a_sample_it_is_the_mean_and_its_standard_error() -> None:
    values = np.array([1.0, 2.0, 4.0, 9.0])
    found = mean_over(values)
    assert found.mean == 4.0
    assert found.error == pytest.approx(values.std(ddof=1) / 2)


def test_samples_of_more_positions_count_more() -> None:
    found = SampleMean(np.array([1.0, 6.0]), np.array([1.0, 2.0]))
    assert found.mean == pytest.approx(7 / 3)
    # what is left of each sample is 1 - 7/3 and 6 - 14/3
    assert found.error == pytest.approx(np.sqrt(2 * 2 * (4 / 3) ** 2) / 3)


def test_of_one_sample_no_error_is_known() -> None:
    assert mean_over(np.array([3.0])).error is None


def test_the_error_is_what_means_of_other_samples_differ_by() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 40, (2000, 50)).astype(np.float64)
    totals = counts * 0.7 + rng.standard_normal(counts.shape) * np.sqrt(counts)
    drawn = [SampleMean(*each) for each in zip(totals, counts, strict=True)]
    assert np.mean([one.error for one in drawn]) == pytest.approx(np.std([one.mean for one in drawn]), rel=0.05)


def test_cosine_by_hand() -> None:
    reference = np.array([[1.0, 0.0], [0.0, 2.0]])
    found = np.array([[5.0, 0.0], [3.0, 3.0]])
    assert cosines(reference, found).mean() == pytest.approx((1 + 0.5**0.5) / 2)
    assert cosines(reference, -reference).mean() == pytest.approx(-1)
    assert cosines(reference, np.zeros_like(found)).mean() == 0.0


def test_recall_by_hand() -> None:
    angles = np.array([0, 10, 25, 90, 105])
    reference = np.stack([np.cos(np.radians(angles)), np.sin(np.radians(angles))], axis=1)
    moved = reference[[0, 1, 3, 2, 4]]  # texts 2 and 3 change places
    # nearest other two: 0:{1,2} 1:{0,2} 2:{1,0} 3:{4,2} 4:{3,2}, and with the places changed
    #                    0:{1,3} 1:{0,3} 2:{4,3} 3:{1,0} 4:{2,3}
    assert recalls_at(reference, moved, 2).mean() == pytest.approx((1 + 1 + 0 + 0 + 2) / 10)
    assert recalls_at(reference, reference, 2).mean() == 1.0


def test_of_equally_near_rows_the_earlier_is_nearer() -> None:
    reference = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    assert recalls_at(reference, reference[[0, 2, 1, 3]], 1).mean() == 1.0, "rows 1 and 2 point alike"


@given(st.integers(0, 10**6), st.integers(2, 30), st.integers(1, 40))
def test_recall_knows_neither_scale_nor_rotation_nor_order(seed: int, texts: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    reference, found = rng.standard_normal((2, texts, 6))
    rotation = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    order = rng.permutation(texts)
    recall = recalls_at(reference, found, k).mean()
    assert 0 <= recall <= 1
    assert recalls_at(reference, reference @ rotation * 7, k).mean() == 1.0
    assert recalls_at(reference[order], found[order], k).mean() == pytest.approx(recall)


@given(st.integers(0, 10**6), st.integers(1, 30))
def test_recall_is_the_same_however_many_rows_are_scored_at_once(seed: int, rows: int) -> None:
    reference, found = np.random.default_rng(seed).standard_normal((2, 30, 4))
    whole = recalls_at(reference, found, 5).mean()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROWS_SCORED_AT_ONCE", rows)
        assert recalls_at(reference, found, 5).mean() == whole
