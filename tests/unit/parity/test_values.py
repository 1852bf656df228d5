from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nestforge.parity.values import Dependence, Event


class Own(torch.nn.Module):
    """Modules ``a`` and ``b`` in code that autograd does not follow, by ``kind``, and ``c``, of which nothing comes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(4, 4) for _ in range(3))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._first(x)
        z: torch.Tensor = self.b(y)
        self.c(z)
        return z.argmax(-1) if self.kind == "whole numbers" else z

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "without gradients":
            with torch.no_grad():
                return self.a(x)
        if self.kind == "numpy":
            return torch.from_numpy(self.a(x).numpy().copy())
        if self.kind == "in place in a view":
            first, _ = self.a(torch.cat([x, x])).unbind(0)
            return first.add_(1)
        return self.a(x)


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("as usual", "ab"),
        ("without gradients", "ab"),
        ("numpy", "abc"),
        ("in place in a view", "abc"),
        ("whole numbers", "abc"),
    ],
)
def test_code_that_autograd_does_not_follow_is_searched_in_order(kind: str, kept: str) -> None:
    module = Own(kind).eval()
    model: Any = SimpleNamespace(module=module, tensors=lambda x: {"y": module(x)})
    trial: Any = SimpleNamespace(feeds=torch.randn(1, 4))
    with torch.no_grad():
        found = Dependence(model, trial, ["y"])
    assert {event.module for event in found.sizes if event.side == "out"} == set(kept)
    there = {event: event.module == "a" and event.side == "in" for event in found.sizes}
    assert found.first(there) == Event("a", "out")
