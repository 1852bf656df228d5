from __future__ import annotations

import re
from pathlib import Path

import pytest
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint, TensorHeader
from nestforge.exporters.checkpoints.stored_tensors import compare_with_headers

UNUSED = re.compile(r"pooler\..+").fullmatch


def _checkpoint(**headers: tuple[tuple[int, ...], str]) -> Checkpoint:
    tensors = {name: TensorHeader(shape, dtype, "model.safetensors") for name, (shape, dtype) in headers.items()}
    return Checkpoint(Path("m"), {}, tensors)


def test_exactly_the_parameters_fit() -> None:
    checkpoint = _checkpoint(a=((2, 3), "F32"), b=((), "BF16"), p=((4,), "I64"))
    names = {"layer.a": "a", "layer.b": "b", "pooler.bias": "p"}
    compare_with_headers(checkpoint, {"layer.a": (2, 3), "layer.b": ()}, names, UNUSED)


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({"a": (2, 3), "b": (1,)}, "tensor b is missing from the weights"),
        ({"a": (3, 2)}, "tensor a has shape [2, 3]; expected [3, 2] as config.json says"),
        ({"a": (2, 3), "i": (2,)}, "tensor i holds I8; expected F32, F16 or BF16"),
        ({"a": (2, 3)}, "tensor 'i' has no place in the model that config.json describes"),
    ],
)
def test_the_first_misfit_is_named(shapes: dict[str, tuple[int, ...]], problem: str) -> None:
    checkpoint = _checkpoint(a=((2, 3), "F32"), i=((2,), "I8"))
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'm: {problem}')}$"):
        compare_with_headers(checkpoint, shapes)
