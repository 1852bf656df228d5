"""Weights with a task merged into them, against numpy in float64; rows, transposes, whole parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nestforge.bundle.entries.task_entry import BASE, MergedTask
from nestforge.bundle.open_bundle import open_bundle
from nestforge.bundle.weight_files import WEIGHTS_NAME
from nestforge.errors import BundleCorruptError
from nestforge.runtime.graphs.initializers import Initializer
from nestforge.runtime.graphs.task_tensors import merged_weights

GOLDEN = Path(__file__).parents[3] / "golden" / "bundle-merged"
RNG = np.random.default_rng(0)
A, B = RNG.standard_normal((2, 6), np.float32), RNG.standard_normal((5, 2), np.float32)
W = (RNG.standard_normal((5, 6)) * 1e-3).astype(np.float32)
EXACT = (W + B.astype(float) @ A.astype(float)).astype(np.float32)


def merged(tmp_path: Path, array: np.ndarray, name: str, rows: int, **arrays: np.ndarray) -> dict[str, np.ndarray]:
    """The first ``rows`` of ``array``, which a store holds behind 12 bytes."""
    store = tmp_path / WEIGHTS_NAME
    store.write_bytes(bytes(12) + array.tobytes())
    task = MergedTask("a", "lora", {name.replace("_T", ".T").replace("__", "."): one for name, one in arrays.items()})
    bundle = replace(open_bundle(GOLDEN).with_merged(task), path=tmp_path, opened={})
    shape = (rows, *array.shape[1:])
    return merged_weights(bundle, [Initializer(name, "float32", shape, 12, 4 * int(np.prod(shape)), WEIGHTS_NAME)])


@pytest.mark.parametrize("rows", [5, 3])
def test_rows_of_outputs(tmp_path: Path, rows: int) -> None:
    pair = {"l__lora_A__weight": A, "l__lora_B__weight": B}
    (found,) = merged(tmp_path, W, "l.weight", rows, **pair).values()
    np.testing.assert_array_equal(found, EXACT[:rows])


@pytest.mark.parametrize("rows", [6, 4])
def test_rows_of_inputs_where_a_weight_lies_transposed(tmp_path: Path, rows: int) -> None:
    pair = {"l__lora_A__weight_T": np.ascontiguousarray(A.T), "l__lora_B__weight": B}
    (found,) = merged(tmp_path, np.ascontiguousarray(W.T), "l.weight.T", rows, **pair).values()
    np.testing.assert_array_equal(found, EXACT.T[:rows])


def test_a_parameter_that_was_trained_whole_takes_the_place_of_the_base_s(tmp_path: Path) -> None:
    (found,) = merged(tmp_path, W, "head.weight", 2, head__weight=-W).values()
    np.testing.assert_array_equal(found, -W[:2])


def test_weights_without_a_pair_stay_the_store_s(tmp_path: Path) -> None:
    assert merged(tmp_path, W, "m.weight", 5, l__lora_A__weight=A, l__lora_B__weight=B) == {}
    assert merged(tmp_path, W[0], "l.bias", 5, l__lora_A__weight=A, l__lora_B__weight=B) == {}
    one = Initializer("encoder.layer.0.attention.self.query.weight", "float32", (16, 16), 0, 1024, WEIGHTS_NAME)
    assert merged_weights(open_bundle(GOLDEN).with_merged(BASE), [one]) == {}
    assert merged_weights(open_bundle(GOLDEN), [one]) == {}


def test_engines_of_other_shapes_than_the_task_s_are_damaged(tmp_path: Path) -> None:
    """Which a bundle from anywhere may hold."""
    pair = {"l__lora_A__weight": A, "l__lora_B__weight": B}
    for array, said in ((W[:, :4], r"l\.weight: float32 \[5, 4\], the task has float32 \[5, 6\]"), (W[0], r"\[6\]")):
        with pytest.raises(BundleCorruptError, match=said):
            merged(tmp_path, np.ascontiguousarray(array), "l.weight", len(array), **pair)
    with pytest.raises(BundleCorruptError, match=r"head\.weight: float32 \[5, 6\], the task has float32 \[2\]"):
        merged(tmp_path, W, "head.weight", 5, head__weight=np.zeros(2, np.float32))
    with pytest.raises(BundleCorruptError, match=r"the pair beside l is of \[1, 6\] and \[5, 2\]"):
        merged(tmp_path, W, "l.weight", 5, l__lora_A__weight=A[:1], l__lora_B__weight=B)
