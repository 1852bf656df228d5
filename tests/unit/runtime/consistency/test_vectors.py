from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.runtime.consistency import vectors as module
from nestforge.runtime.consistency.vectors import cosines, recalls_at


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
