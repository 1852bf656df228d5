from __future__ import annotations

import pytest
import torch
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.bundle.manifest import TextEntry
from nestforge.compiler.nest.difference import difference
from nestforge.compiler.nest.watched import Pass
from nestforge.exporters.signature import Signature

TOKENS = TensorSpec("tokens", "float32", ("batch", "sequence", 2))
EMBEDDING = TensorSpec("embedding", "float32", ("batch", 2))
POOLER = TensorSpec("pooler", "float32", ("batch", 2))
TEXT = TextEntry("tokenizer.json", "ids", "mask", None, "embedding")


def of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(list(rows))


def test_equal_passes_differ_by_nothing() -> None:
    outputs = (torch.ones(1, 3, 2), torch.ones(1, 2))
    same = Pass(outputs, (torch.ones(1, 3, 2),))
    assert difference(Signature((), (TOKENS, EMBEDDING), text=TEXT), same, same, torch.ones(1, 3)) == 0


def test_every_part_counts_relative_to_the_teachers_length_and_padding_not_at_all() -> None:
    signature = Signature((), (TOKENS, POOLER, EMBEDDING), text=TEXT)
    weights = of([1, 1, 0])
    teacher = Pass(
        (of([3, 4], [0, 2], [1, 1])[None], of([1, 0]), of([0, 1])),
        (of([1, 0], [0, 1], [1, 1])[None], of([2, 0], [2, 0], [1, 1])[None]),
    )
    student = Pass(
        (of([3, 5], [0, 1], [9, 9])[None], of([7, 7]), of([0, 0.5])),  # the pooler follows from the tokens
        (of([1, 1], [0, 1], [9, 9])[None], of([2, 0], [0, 0], [9, 9])[None]),
    )
    tokens = (1 / 25 + 1 / 4) / 2
    embedding = 0.25
    hidden = (0.5 + 0.5) / 2
    assert float(difference(signature, student, teacher, weights)) == pytest.approx(tokens + embedding + hidden)


def test_a_model_without_tokens_or_embedding_is_held_to_all_it_has() -> None:
    signature = Signature((), (POOLER,), text=TextEntry("tokenizer.json", "ids", "mask", None, None))
    found = difference(signature, Pass((of([1, 1]),), ()), Pass((of([1, 0]),), ()), of([1, 1]))
    assert float(found) == pytest.approx(1)


def test_a_vector_of_zeros_and_a_batch_without_tokens_are_no_division_by_zero() -> None:
    zeros = Pass((torch.zeros(1, 2, 2),), ())
    found = difference(Signature((), (TOKENS,)), zeros, zeros, torch.zeros(1, 2))
    assert float(found) == 0
