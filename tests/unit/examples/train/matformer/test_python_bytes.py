"""The rows that come of the standard library's parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.examples.train.matformer.python_bytes import PythonBytes, read_python_bytes


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


def test_too_few_sources_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"0 bytes of Python for the train part, expected at least 17; train with"
    ):
        read_python_bytes(window=16, held_out=4, stdlib=tmp_path)
