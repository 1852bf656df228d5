"""The split by module, what is dropped from it, and the rows that come of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.tools.train.matformer.python_bytes import PARTS, PythonBytes, part_of, read_python_bytes

LICENCE = "# " + "This block stands in many files and is long enough to be no idiom. " * 2


def test_a_file_is_in_the_part_of_its_top_level_module(stdlib: Path) -> None:
    data = read_python_bytes(window=16, held_out=4, stdlib=stdlib)
    for number in range(40):
        name = f"module{number}"
        holding = [part for part in PARTS if f"function_{number}_0(".encode() in data.parts[part]]
        assert holding == [part_of(name)]
    assert {part_of(f"module{number}") for number in range(40)} == set(PARTS)


def test_files_of_a_package_stay_together(stdlib: Path) -> None:
    held_out = next(f"package{n}" for n in range(1000) if part_of(f"package{n}") == "test")
    for name in ("one.py", "deep/two.py"):
        (stdlib / held_out / name).parent.mkdir(parents=True, exist_ok=True)
        (stdlib / held_out / name).write_text(f"# of the package: {name}\n")
    text = read_python_bytes(window=16, held_out=4, stdlib=stdlib).parts["test"]
    assert b"of the package: one.py" in text
    assert b"of the package: deep/two.py" in text


def test_blocks_of_several_modules_are_in_no_held_out_part(stdlib: Path) -> None:
    for number in range(40):
        file = stdlib / f"module{number}.py"
        file.write_text(f"{LICENCE}\n\n{file.read_text()}\n\nif shared_idiom:\n    pass\n")
    data = read_python_bytes(window=16, held_out=4, stdlib=stdlib)
    assert [data.parts[part].count(b"no idiom") > 0 for part in PARTS] == [True, False, False]
    assert all(b"if shared_idiom:\n    pass" in data.parts[part] for part in PARTS)  # short blocks stay
    assert all(data.parts[part].count(b"def function_") % 8 == 0 for part in PARTS)  # and so does what follows


def test_generated_tables_and_undecodable_files_are_left_out(stdlib: Path) -> None:
    before = read_python_bytes(window=16, held_out=4, stdlib=stdlib)
    for name in ("encodings/table.py", "pydoc_data/topics.py", "_sysconfigdata_x.py", "tests/t.py"):
        (stdlib / name).parent.mkdir(exist_ok=True)
        (stdlib / name).write_text("table = 1\n")
    (stdlib / "latin.py").write_bytes(b"# \xe4\xf6\xfc\n")
    assert read_python_bytes(window=16, held_out=4, stdlib=stdlib) == before


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
