"""Weights of 4 bits that were chosen on examples."""

from typing import Any

import numpy as np
import pytest
import torch
from nestforge.compiler.graph.encodings import unpacked
from nestforge.compiler.graph.precision import error_feedback
from nestforge.compiler.graph.precision.error_feedback import rounded
from support.derived_engines import rounded as plainly

RANDOM = np.random.default_rng(0)
# Inputs that follow from fewer numbers, some of them large, as those of a layer do.
ROWS = RANDOM.normal(size=(400, 12)) @ RANDOM.normal(size=(12, 96)) + RANDOM.normal(size=(400, 96)) / 4
ROWS[:, 7] *= 20
MOMENTS = (ROWS.T @ ROWS).astype(np.float32)
W = RANDOM.normal(size=(40, 96)).astype(np.float32)


def chosen(weight: np.ndarray, moments: np.ndarray = MOMENTS) -> dict[str, np.ndarray]:
    stored = {"w": torch.from_numpy(weight)}.__getitem__
    return rounded([(["w"], moments)], stored, {"w.int4", "w.int4-scale"}, lambda done: None)


def error(weight: np.ndarray) -> float:
    return float(np.square(ROWS @ (weight - W).T).sum())


def test_products_of_the_examples_are_nearer_than_with_plain_rounding() -> None:
    found = chosen(W)
    assert (found["w.int4"].shape, found["w.int4"].dtype) == ((40, 3, 16), np.uint8)
    assert error(unpacked(found["w.int4"], found["w.int4-scale"])) < 0.5 * error(plainly(W, "w.int4"))


def test_a_block_may_be_larger_and_the_last_one_of_an_output_not_full() -> None:
    stored = {"w": torch.from_numpy(W)}.__getitem__
    found = rounded([(["w"], MOMENTS)], stored, {"w.int4", "w.int4-g128"}, lambda done: None)
    assert {name: found[name].shape for name in ("w.int4", "w.int4-g128", "w.int4-g128-scale")} == {
        "w.int4": (40, 3, 16),
        "w.int4-g128": (40, 1, 64),
        "w.int4-g128-scale": (40, 1),
    }
    numbers = unpacked(found["w.int4-g128"], found["w.int4-g128-scale"])
    assert not numbers[:, 96:].any()
    assert error(numbers[:, :96]) < 0.5 * error(plainly(W, "w.int4-g128"))


def test_progress_counts_weights() -> None:
    done: list[int] = []
    weights = {name: torch.from_numpy(W) for name in "abc"}
    rounded([(["a", "b"], MOMENTS), (["c"], MOMENTS)], weights.__getitem__, {"a.int4"}, done.append)
    assert done == [0, 2]


def test_inputs_without_relations_are_rounded_plainly() -> None:
    found = chosen(W, np.eye(96, dtype=np.float32))
    np.testing.assert_array_equal(unpacked(found["w.int4"], found["w.int4-scale"]), plainly(W, "w.int4"))


@pytest.mark.parametrize(
    "fault",
    [
        lambda integers, scales: (np.roll(integers, 1, axis=0), scales),
        lambda integers, scales: (integers * np.int8(0), scales),
        lambda integers, scales: (integers, scales * np.float32(1.3)),
    ],
    ids=["other outputs", "zeros", "scales"],
)
def test_numbers_of_other_weights_are_not_chosen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = error_feedback._rows
    monkeypatch.setattr(error_feedback, "_rows", lambda *given: fault(*honest(*given)))
    found = chosen(W)
    np.testing.assert_array_equal(unpacked(found["w.int4"], found["w.int4-scale"]), plainly(W, "w.int4"))


def test_one_block_of_other_weights_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the output is, which is as a whole no further away than rounding can leave it."""
    rows = RANDOM.normal(size=(100, 12)) @ RANDOM.normal(size=(12, 1280)) + RANDOM.normal(size=(100, 1280)) / 4
    weight, moments = RANDOM.normal(size=(8, 1280)).astype(np.float32), (rows.T @ rows).astype(np.float32)
    honest, expected = error_feedback._rows, unpacked(*chosen(weight, moments).values())

    def faulty(*given: Any) -> tuple[np.ndarray, np.ndarray]:
        integers, scales = honest(*given)
        integers[7, 1] = 0
        return integers, scales

    monkeypatch.setattr(error_feedback, "_rows", faulty)
    plain = plainly(weight, "w.int4")[7, 32:64]
    assert (expected[7, 32:64] != plain).any()
    expected[7, 32:64] = plain
    np.testing.assert_array_equal(unpacked(*chosen(weight, moments).values()), expected)


def test_the_first_outputs_are_those_of_a_submodel(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, first = chosen(W), chosen(W[:16].copy())
    monkeypatch.setattr(error_feedback, "_AT_ONCE", 96 * 3)
    for found in (first, chosen(W)):
        numbers = unpacked(found["w.int4"], found["w.int4-scale"])
        expected = unpacked(whole["w.int4"], whole["w.int4-scale"])[: len(numbers)]
        np.testing.assert_allclose(numbers, expected, rtol=1e-5)  # products of other shapes sum otherwise


def test_an_input_that_is_always_0_costs_no_other_and_a_weight_without_examples_is_left_out() -> None:
    dead = MOMENTS.copy()
    dead[5], dead[:, 5] = 0, 0
    found = chosen(W, dead)
    assert np.isfinite(found["w.int4-scale"]).all()
    assert chosen(W, np.zeros_like(MOMENTS)) == {}
