"""Examples of a module in memory, and outputs by their place in what it returns."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from nestforge.errors import InputError, UnsupportedModelError
from nestforge.exporters.in_memory.examples import module_in_memory
from nestforge.exporters.in_memory.module import named_outputs
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


class Then(Mlp):
    """What ``act`` makes of the module, what came in and an answer ``[B, 4]``."""

    def __init__(self, act: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.act, self.calls, self.loose = act, 0, list[torch.Tensor]()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        self.calls += 1
        return self.act(self, x, super().forward(x))


class Hearing(torch.nn.Module):
    """Attention of PyTorch, whose mask of keys is 1 where one is hidden; it answers zeros where all are."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
        return x + found


def _assigned(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    self.mean = self.mean + y[0]
    return y


def _loose() -> Then:
    module = Then(lambda self, x, y: y + self.loose[0])
    module.loose.append(torch.ones(4))
    return module


def test_the_module_itself_never_runs() -> None:
    module = Then(lambda self, x, y: y)
    module_in_memory(module, np.zeros((1, 8)), None)  # of float64
    assert module.calls == 0


def _anew(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    self.mean = torch.zeros(4, dtype=x.dtype)
    self.longest = x.shape[0]
    return y + self.mean


def test_numbers_that_a_pass_makes_anew_are_no_state() -> None:
    (given,) = module_in_memory(Then(_anew), TWO, None).inputs
    assert given.name == "x"


TWO = torch.randn(2, 8)
IMPURE: dict[str, tuple[torch.nn.Module, str]] = {
    "rows of each other": (Then(lambda self, x, y: y.softmax(0)), "answers a row otherwise when others are beside it"),
    "less of itself": (Then(lambda self, x, y: y - y[:1]), r"when others are beside it \(output output\)"),
    "a buffer in place": (
        Then(lambda self, x, y: y + self.mean.mul_(0.9)),
        r"^model: a pass changes its buffer mean at test_examples.py:\d+ .*, which no engine keeps .*; return the",
    ),
    "a view of a buffer": (
        Then(lambda self, x, y: self.mean[2:].add_(1).sum() + y),
        "a pass changes its buffer mean at",
    ),
    "another buffer": (Then(_assigned), "^model: a pass changes its buffer mean, which no engine keeps"),
    "random numbers": (
        Then(lambda self, x, y: y + 1e-3 * torch.randn_like(y)),
        r"^model: randn_like draws random numbers at test_examples.py:\d+ ",
    ),
    "dropout at all times": (Then(lambda self, x, y: functional.dropout(y, 0.1)), "draws random numbers"),
    "one name of two": (Then(lambda self, x, y: {"a.b": y, "a": {"b": -y}}), "two outputs are called 'a.b'"),
    "one output twice": (Then(lambda self, x, y: (y, y)), "output output_1 is the output output_0 as it is"),
    "an input": (Then(lambda self, x, y: {"y": y, "z": x}), "output z is the input x as it is"),
    "the name of an input": (Then(lambda self, x, y: {"x": y}), "output x is called as an input"),
    "the name of a buffer": (Then(lambda self, x, y: {"mean": y}), "output mean is called as a parameter or buffer"),
    "no buffer": (_loose(), r"model: loose is a tensor that is no buffer; use register_buffer\('loose', ...\)"),
    "a script": (torch.jit.trace(Mlp(), TWO), r"model: made by torch.jit, which no graph has; give the torch.nn.Mod"),
    "a compiled one": (torch.compile(Mlp()), "model: made by torch.compile, which no graph has"),  # type: ignore[dict-item, unused-ignore]
}


@pytest.mark.parametrize("case", IMPURE)
def test_what_no_engine_does_alike_is_refused(case: str) -> None:
    module, expected = IMPURE[case]
    with pytest.raises((InputError, UnsupportedModelError), match=expected) as refusal:
        module_in_memory(module, TWO, None)
    assert "\n" not in str(refusal.value)


class Picking(Mlp):
    """The last token of each row."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[torch.arange(len(x)), lengths - 1]


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
    "a mask that hides and leaves numbers": (
        Hearing(),
        {"x": torch.randn(2, 5, 8), "hidden": torch.zeros(2, 5, dtype=torch.bool)},
        {"x": (*ROWS, None), "hidden": ROWS},
        "hidden: where it is 1 throughout, Hearing hides every token; expected a mask that is 1 where a token counts",
    ),
    "places in a sequence": (
        Picking(),
        {"x": torch.randn(2, 5, 8), "lengths": torch.tensor([2, 5])},
        {"x": (*ROWS, None)},
        "lengths has places within a sequence, of which each request has another number; compare it with torch.arange",
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


ONE, PAIR = torch.zeros(1), torch.zeros(2)
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Found:
    scores: torch.Tensor
    rest: tuple[torch.Tensor, ...]
    note: str = "no tensor"


def test_names_are_the_structure() -> None:
    for found, names in (
        (ONE, ["output"]),
        ((ONE, PAIR), ["output_0", "output_1"]),
        ({"a": ONE, "b": {"c": PAIR}, "n": 3}, ["a", "b.c"]),
        ((ONE, [ONE, {"deep": PAIR}]), ["output_0", "output_1.0", "output_1.1.deep"]),
        (Pair(ONE, PAIR), ["left", "right"]),
        (Found(ONE, (ONE, PAIR)), ["scores", "rest.0", "rest.1"]),
        (None, []),
    ):
        assert list(named_outputs(found)) == names
