"""What a module takes, found on examples; what it does not take is one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from nestforge.errors import InputError, UnsupportedModelError
from nestforge.exporters.in_memory.examples import module_in_memory
from support.plain_modules import Block, Mlp, Tagger
from torch.nn import functional

TOKENS, MASK = torch.ones(2, 9, dtype=torch.int64), torch.ones(2, 9, dtype=torch.int64)
ROWS = ("batch", "sequence")


class Summing(torch.nn.Module):
    """Whole numbers of no table, and rows that are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, count: torch.Tensor, on: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return (count.float() * on) @ self.weight * scale


class Causal(torch.nn.Module):
    """Positions see those before them: a row that begins with padding has no answer."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.embed = Block(), torch.nn.Embedding(50, 16)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        scores = (x @ x.transpose(1, 2)).masked_fill(~mask.bool()[:, None], float("-inf"))
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        found: torch.Tensor = scores.masked_fill(later, float("-inf")).softmax(-1) @ x
        return found


def test_tensors_by_order_of_numpy_and_what_they_may_hold() -> None:
    examples = (np.full((2, 3), 6), np.array([[True, False, True]] * 2))
    count, on = module_in_memory(Summing(), examples, None).inputs
    assert (count.name, count.dtype, count.dims, count.high) == ("count", "int64", ("batch", 3), 7)
    assert (on.name, on.dtype, on.dims, on.row_needs) == ("on", "bool", ("batch", 3), None)


def test_a_mask_without_which_there_are_no_numbers_is_found_by_asking() -> None:
    ids, mask = module_in_memory(Causal(), (TOKENS, MASK), {"ids": ROWS, "mask": ROWS}).inputs
    assert (ids.high, ids.row_needs) == (50, None)
    assert (mask.high, mask.row_needs) == (2, "first_token")


class Attending(torch.nn.Module):
    """A mask of attention, which PyTorch answers with zeros where it hides all, and a feature of zeros and ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + marked[..., None]
        q, seen = self.query(x)[:, None], mask.bool()[:, None, None]
        return functional.scaled_dot_product_attention(q, q, q, attn_mask=seen)[:, 0]


def test_a_mask_of_attention_is_found_by_what_it_reaches() -> None:
    examples = {"ids": TOKENS, "mask": MASK, "marked": MASK}
    _, mask, marked = module_in_memory(Attending(), examples, dict.fromkeys(examples, ROWS)).inputs
    assert (mask.row_needs, marked.row_needs) == ("token", None)


class Hiding(Tagger):
    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> dict[str, object]:
        return super().forward(tokens, 1 - mask, scale)


class Failing(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != 8:
            raise ValueError("eight, please")
        return super().forward(x)


class Unnamed(Mlp):
    def forward(self, *rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows[0])


FEW, DYNAMIC = torch.eye(2, 9).long(), {"tokens": ROWS, "mask": ROWS}
ALL = {"tokens": TOKENS, "mask": MASK, "scale": torch.ones(2)}
REFUSED: dict[str, tuple[torch.nn.Module, Any, Any, str]] = {
    "nothing": (
        Mlp(),
        None,
        None,
        "example_inputs: expected those of a torch.nn.Module, tensors by name or in the order",
    ),
    "a number": (Mlp(), {"x": 1}, None, "example_inputs: x: expected a tensor, got int; what is none belongs into"),
    "another name": (Tagger(), {**ALL, "tokns": TOKENS}, None, "forward takes no 'tokns'; did you mean 'tokens'"),
    "too few": (Tagger(), (TOKENS,), None, "forward also takes mask, scale; give an example of each"),
    "too many": (Mlp(), (TOKENS, MASK), None, "example_inputs: 2 of them, and forward takes x; give those"),
    "no names": (Unnamed(), (torch.ones(2, 8),), None, "1 of them, and forward takes none by a name"),
    "a complex one": (
        Mlp(),
        torch.ones(2, 8, dtype=torch.complex64),
        None,
        "x is torch.complex64; expected floats, bool",
    ),
    "no batch": (Mlp(), torch.ones(()), None, r"dynamic: x: expected 'batch', then .* of \[\], got \['batch'\]"),
    "an unknown input": (Mlp(), torch.ones(2, 8), {"y": ROWS}, "dynamic: no input 'y'; expected one of x"),
    "an unknown dimension": (
        Mlp(),
        torch.ones(2, 8),
        {"x": ("batch", "time")},
        "dynamic: x: 'time' at 1; expected 'batch'",
    ),
    "no batch in front": (Mlp(), torch.ones(2, 8), {"x": (None, "batch")}, "every input has the batch in front"),
    "two sizes": (Tagger(), {**ALL, "scale": torch.ones(3)}, None, "batch is 2 in tokens and 3 in scale; expected one"),
    "beyond its table": (
        Tagger(),
        {**ALL, "tokens": TOKENS * 50},
        None,
        "tokens has .* 50..50; .* of a table of 50 rows",
    ),
    "below zero": (
        Tagger(),
        {**ALL, "tokens": -TOKENS},
        None,
        "tokens has whole numbers -1..-1; expected some from 0 on",
    ),
    "zeros of no table": (
        Tagger(),
        {**ALL, "mask": MASK * 0},
        None,
        "mask has whole numbers 0..0; .* the largest that it",
    ),
    "a mask that hides": (
        Hiding(),
        {**ALL, "mask": FEW},
        DYNAMIC,
        "mask: where it is 1 throughout, Hiding answers with",
    ),
    "an error of its own": (
        Failing(),
        torch.ones(2, 4),
        None,
        r"Failing does not run .* at test_examples.py:\d+ .*eight",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    module, examples, dynamic, expected = REFUSED[case]
    with pytest.raises((InputError, UnsupportedModelError), match=expected) as refusal:
        module_in_memory(module, examples, dynamic)
    assert "\n" not in str(refusal.value)
