"""Outputs by their place in what a module returns."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch
from nestforge.exporters.in_memory.module import named_outputs

ONE, TWO = torch.zeros(1), torch.zeros(2)
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Found:
    scores: torch.Tensor
    rest: tuple[torch.Tensor, ...]
    note: str = "no tensor"


def test_names_are_the_structure() -> None:
    for found, names in (
        (ONE, ["output"]),
        ((ONE, TWO), ["output_0", "output_1"]),
        ({"a": ONE, "b": {"c": TWO}, "n": 3}, ["a", "b.c"]),
        ((ONE, [ONE, {"deep": TWO}]), ["output_0", "output_1.0", "output_1.1.deep"]),
        (Pair(ONE, TWO), ["left", "right"]),
        (Found(ONE, (ONE, TWO)), ["scores", "rest.0", "rest.1"]),
        (None, []),
    ):
        assert list(named_outputs(found)) == names
