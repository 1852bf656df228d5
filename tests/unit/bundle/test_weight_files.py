"""Names of the files of a weight store, and the hash of all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from nestforge.bundle.weight_files import hash_of_all, is_of_weights, weight_names, weight_problems, weights_in


def test_one_file_has_the_plain_name_and_several_are_numbered() -> None:
    assert weight_names(1) == ("weights.safetensors",)
    assert weight_names(2) == ("weights-00001-of-00002.safetensors", "weights-00002-of-00002.safetensors")
    assert list(weight_names(120)) == sorted(weight_names(120))
    assert all(map(is_of_weights, weight_names(1) + weight_names(12)))


@pytest.mark.parametrize(
    "name",
    ["weights-1-of-2.safetensors", "ranking.safetensors", "weights.safetensors.writing", "a/weights.safetensors"],
)
def test_what_is_no_file_of_a_store(name: str) -> None:
    assert not is_of_weights(name)


@pytest.mark.parametrize(
    "names",
    [
        weight_names(3)[:2],
        weight_names(2) + weight_names(1),
        weight_names(2) + weight_names(3),
        ("weights-00001-of-00001.safetensors",),
    ],
)
def test_files_that_are_not_all_of_one_store(names: tuple[str, ...]) -> None:
    (problem,) = weight_problems(sorted(names))
    assert problem.startswith("files of the weight store: weights")
    assert problem.endswith("expected weights.safetensors, or each of -of-N once")


def test_all_files_of_a_store_or_none() -> None:
    assert [*weight_problems(()), *weight_problems(weight_names(1)), *weight_problems(weight_names(3))] == []


def test_the_hash_of_one_file_is_its_own() -> None:
    assert (hash_of_all([]), hash_of_all(["ab" * 32])) == (None, "ab" * 32)
    assert hash_of_all(["00" * 32, "11" * 32]) == hashlib.sha256(b"0" * 64 + b"1" * 64).hexdigest()


def test_files_are_found_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in (*weight_names(11)[::-1], "ranking.safetensors", "weights-00001-of-00011.safetensors.writing"):
        (tmp_path / name).touch()
    assert tuple(path.name for path in weights_in(tmp_path)) == weight_names(11)
