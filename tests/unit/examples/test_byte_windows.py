"""The rows that come of the standard library's parts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nestforge.examples.byte_windows import MASK, MaskedBytes, PythonBytes, masked, read_masked_bytes, read_python_bytes


@pytest.fixture
def data(stdlib: Path) -> MaskedBytes:
    return read_masked_bytes(16, 0.25, 8, stdlib)


def test_targets_are_the_next_bytes(stdlib: Path) -> None:
    data = read_python_bytes(window=16, held_out=4, stdlib=stdlib)
    for rows in (data.validation, data.test):
        assert rows.inputs.shape == rows.targets.shape == (4, 16)
        assert torch.equal(rows.inputs[:, 1:], rows.targets[:, :-1])
    assert bytes(data.test.inputs[0].tolist()) == data.parts["test"][:16]
    assert bytes(data.test.targets[-1].tolist()) == data.parts["test"][-16:]


def test_batches_are_windows_of_the_training_part_that_the_seed_decides(stdlib: Path) -> None:
    data = read_python_bytes(window=16, held_out=4, stdlib=stdlib)
    first, again, other = (list(data.batches(3, 5, seed)) for seed in (0, 0, 1))
    assert len(first) == 5
    for batch in first:
        assert batch.inputs.shape == (3, 16)
        assert all(bytes(row.tolist()) in data.parts["train"] for row in batch.inputs)
    assert all(torch.equal(one.inputs, two.inputs) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0].inputs, other[0].inputs)


def test_facts_tell_one_text_from_another() -> None:
    one = PythonBytes({"train": b"aa", "validation": b"b", "test": b"c"}, 1, 1)
    other = PythonBytes({"train": b"a", "validation": b"ab", "test": b"c"}, 1, 1)
    assert one.facts["bytes"] == {"train": 2, "validation": 1, "test": 1}
    assert one.facts["sha256"] != other.facts["sha256"]


def restored(inputs: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return inputs.scatter(1, positions, targets)


@given(st.integers(1, 5), st.integers(2, 40), st.floats(0.01, 1.0), st.integers(0, 1000))
def test_targets_in_their_places_give_the_text_back(rows: int, length: int, share: float, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    text = torch.randint(32, 127, (rows, length), generator=chance)
    found = masked(text, share, chance)
    assert found.positions.shape == found.targets.shape == (rows, max(1, round(share * length)))
    assert (found.positions.diff(dim=1) > 0).all(), "rising, so each once"
    assert torch.equal(restored(found.inputs, found.positions, found.targets), text)


def test_most_chosen_bytes_are_masked_some_replaced_some_kept() -> None:
    chance = torch.Generator().manual_seed(0)
    text = torch.randint(0, 256, (400, 100), generator=chance)
    found = masked(text, 0.15, chance)
    put = found.inputs.gather(1, found.positions)
    masks, kept = (put == MASK).double().mean().item(), (put == found.targets).double().mean().item()
    assert masks == pytest.approx(0.8, abs=0.02)
    assert kept == pytest.approx(0.1 + 0.1 / 256, abs=0.02)
    assert put[put != MASK].max() < MASK


def test_rows_are_windows_of_text_without_indentation(data: MaskedBytes) -> None:
    assert b"\npass\n" in data.parts["train"]
    assert b"    pass" not in data.parts["train"]
    batch = next(iter(data.batches(4, 1, seed=0)))
    for part, rows in (("train", batch), ("validation", data.validation), ("test", data.test)):
        text = restored(rows.inputs, rows.positions, rows.targets)
        assert all(bytes(row.tolist()) in data.parts[part] for row in text)
    assert [len(rows.inputs) for rows in (data.validation, data.test, batch)] == [8, 8, 4]
    assert data.test.inputs.shape[1] == data.window


def test_the_seed_decides_batches_and_nothing_the_held_out_rows(data: MaskedBytes) -> None:
    first, again, other = (list(data.batches(3, 4, seed)) for seed in (0, 0, 1))
    assert len(first) == 4
    assert all(torch.equal(one.inputs, two.inputs) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0].inputs, other[0].inputs)
    later = replace(data)
    torch.manual_seed(5)
    assert torch.equal(later.test.inputs, data.test.inputs)
    assert not torch.equal(data.test.positions, data.validation.positions)


def test_knowing_nothing_is_as_good_as_the_commonest_byte(data: MaskedBytes) -> None:
    targets = data.test.targets.flatten().tolist()
    assert data.commonest == max(map(targets.count, targets)) / len(targets)


def test_parts_of_the_rows(data: MaskedBytes) -> None:
    first, second, third = data.test.parts(3)
    assert [len(part.inputs) for part in (first, second, third)] == [3, 3, 2]
    assert second.inputs.equal(data.test.inputs[3:6])
    assert second.positions.equal(data.test.positions[3:6])
    assert second.targets.equal(data.test.targets[3:6])


def test_facts_of_masked_bytes_tell_one_text_from_another(data: MaskedBytes) -> None:
    other = replace(data, parts={**data.parts, "test": data.parts["test"] + b"x"})
    assert other.facts["sha256"] != data.facts["sha256"]
    assert data.facts["held_out_rows"] == 8
