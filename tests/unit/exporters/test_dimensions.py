"""To how many numbers an embedding may be cut: requested, listed by the folder, or any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.errors import CheckpointError, InputError, NestforgeError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint
from nestforge.exporters.dimensions import with_dimensions
from nestforge.exporters.signature import Signature

EMBEDDING = TensorSpec("vector", "float32", ("batch", 16), role="embedding")
LISTED = {"is_matryoshka": True, "matryoshka_dimensions": [4, 32, 8]}


def stated(config: dict[str, Any], requested: tuple[int, ...] | None = None, output: TensorSpec = EMBEDDING) -> Any:
    found = with_dimensions(Signature((), (output,)), Checkpoint(Path("m"), config, {}), None, requested)
    return found.outputs[0].dimensions


@pytest.mark.parametrize(
    ("config", "requested", "expected"),
    [
        ({}, None, None),
        ({"is_matryoshka": True}, None, None),
        ({"is_matryoshka": False}, None, (16,)),
        (LISTED, None, (16, 8, 4)),
        (LISTED, (2, 16), (16, 2)),
        ({}, (12,), (16, 12)),
    ],
)
def test_a_request_goes_before_the_folder(config: dict[str, Any], requested: Any, expected: Any) -> None:
    assert stated(config, requested) == expected


def test_other_models_have_none() -> None:
    logits = TensorSpec("logits", "float32", ("batch", 16), role="classes")
    assert stated(LISTED, output=logits) is None
    with pytest.raises(InputError, match=r"no output is said to be the embedding; .* the model has logits"):
        stated({}, (4,), output=logits)


@pytest.mark.parametrize(
    ("config", "requested", "error", "message"),
    [
        ({}, (), InputError, r"`dimensions`: expected numbers from 1 to 16, the width of vector, got \[\]"),
        ({}, (8, 17), InputError, r"`dimensions`: expected numbers from 1 to 16, the width of vector, got \[8, 17\]"),
        ({"matryoshka_dimensions": [8, 0]}, None, CheckpointError, "matryoshka_dimensions: expected numbers of at l"),
        ({"matryoshka_dimensions": 8}, None, CheckpointError, "matryoshka_dimensions: expected a list"),
        ({"is_matryoshka": "yes"}, None, CheckpointError, "is_matryoshka: expected"),
    ],
)
def test_refused(config: dict[str, Any], requested: Any, error: type[NestforgeError], message: str) -> None:
    with pytest.raises(error, match=message):
        stated(config, requested)
