"""Budgets as parameters of a Triton request; tests/unit/compiler/platforms asks a server."""

from __future__ import annotations

import pytest
from nestforge.errors import InputError
from nestforge.serving.triton import options_of


def test_parameters_of_a_request() -> None:
    assert options_of({"latency_ms": "2.5", "submodel": "S"}) == {"latency_ms": 2.5, "submodel": "S"}
    assert options_of({"deadline_ms": 20, "dimensions": 8}) == {"deadline_ms": 20.0, "dimensions": 8}
    assert options_of({"exits": "0.3", "truncate": True}) == {"exits": 0.3, "truncate": True}
    assert options_of({"exits": "off"}) == {"exits": "off"}
    assert options_of({"exits": "0.3,0.5"}) == {"exits": (0.3, 0.5)}
    for wrong, says in (
        ({"latency": 1}, "no parameter 'latency'; did you mean 'latency_ms'"),
        ({"latency_ms": "soon"}, "latency_ms: expected a positive number, got 'soon'"),
        ({"deadline_ms": 0}, "deadline_ms: expected a positive number, got 0"),
        ({"submodel": 3}, "submodel: expected a name, got 3"),
    ):
        with pytest.raises(InputError, match=says):
            options_of(wrong)
