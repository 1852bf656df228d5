from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from nestforge.errors import SelectionError
from nestforge.runtime.inputs.limits import positive_limit


@pytest.mark.parametrize("limit", [2, 2.0, np.float32(2), np.int64(2), Fraction(2)])
def test_a_number_above_0_is_a_limit(limit: object) -> None:
    assert positive_limit("memory_mb", limit) == 2.0


@pytest.mark.parametrize(
    ("limit", "shown"),
    [
        (0, "0"),
        (-1.5, "-1.5"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (10**400, "inf"),
        (True, "True"),
        ("5", "'5'"),
        (None, "None"),
    ],
)
def test_anything_else_is_refused(limit: object, shown: str) -> None:
    with pytest.raises(SelectionError) as error:
        positive_limit("memory_mb", limit)
    assert str(error.value) == f"memory_mb: expected a positive number, got {shown}"
