"""A small language model with heads that shrink, compiled for TensorRT and for the processor, and its plans."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.compiler.tensorrt.build_bundle import build_plans
from nestforge.runtime.generation.row import Generated
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.fake_cuda import World
from support.fake_tensorrt import host_with_gpu
from support.shared_folder import made_once
from support.tiny_compile import board
from support.tiny_matlm import save_tiny_matlm

# The largest, one with its heads, and one with fewer.
WHOLE, SAME_HEADS, NARROW = "ffn32-heads4", "ffn16-heads4", "ffn16-heads3"
CAPACITIES = (16, 40)
# The first release whose parser takes graphs that keep a cache.
RELEASE = "10.15.0"


def generating_folder(factory: pytest.TempPathFactory) -> Path:
    """The folder ``model`` and what is compiled of it, each with the three submodels: ``graphs`` for TensorRT,
    ``plans``, which has plans beside them as ``played_gpu`` builds them, and ``processor`` for ONNX Runtime. Only to be
    read."""

    def make(folder: Path) -> None:
        sizes = {"num_hidden_layers": 2, "intermediate_size": 32, "max_position_embeddings": 48}
        model = save_tiny_matlm(folder / "model", nested_heads=True, **sizes)
        options: dict[str, Any] = {"submodels": [SAME_HEADS, NARROW], "include": "budgets"}
        options |= {"levels": {"ffn": (1.0,), "heads": (1.0,)}, "generate": True}
        common: dict[str, Any] = {"budgets": {"full": {}}, "buckets": ["1x8"]}
        nestforge.compile(model, board(**common), folder / "processor", measure=False, **options)
        device = board(backend="tensorrt", capacities=list(CAPACITIES), **common)
        nestforge.compile(model, device, folder / "graphs", emit_only=True, **options)
        shutil.copytree(folder / "graphs", folder / "plans")
        with played_gpu(folder):
            build_plans(folder / "plans")

    return made_once(factory, "generating-plans", make)


@contextmanager
def played_gpu(folder: Path, **facts: Any) -> Iterator[World]:
    """A host that plays a GPU, and may run what was built in ``folder``; ``facts`` are of its World."""
    with host_with_gpu(folder / "cache", **{"version": RELEASE, **facts}) as world:
        yield world


def require_same(found: Generated, known: Generated) -> None:
    """Tokens, and as the likeliest one may stay so whatever is lost of a text, how likely each of them was."""
    for row, expected in zip(found.rows, known.rows, strict=True):
        assert (row.tokens, row.reused_tokens) == (expected.tokens, expected.reused_tokens)
        assert row.log_probabilities is not None
        assert expected.log_probabilities is not None
        mine, theirs = ([each.token for each in own.log_probabilities or ()] for own in (row, expected))
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


@contextmanager
def opened_plans(folder: Path, **facts: Any) -> Iterator[tuple[ElasticModel, World]]:
    """The model of the plans, and the host that plays its GPU."""
    with played_gpu(folder, **facts) as world, load(folder / "plans", threads=1) as model:
        yield model, world
