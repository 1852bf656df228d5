"""Small models compiled for TensorRT and for the processor, and their plans: a language model with heads that shrink,
and two encoder-decoders."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.compiler.tensorrt import check_plan
from nestforge.compiler.tensorrt.build_bundle import build_plans
from nestforge.runtime.generation.row import Generated
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.fake_cuda import World
from support.fake_tensorrt import host_with_gpu
from support.generating import t5_folder
from support.shared_folder import made_once
from support.tiny_compile import board
from support.tiny_matlm import save_tiny_matlm
from support.tiny_mhe import save_tiny_pair

# The largest, one with its heads, and one with fewer.
WHOLE, SAME_HEADS, NARROW = "ffn32-heads4", "ffn16-heads4", "ffn16-heads3"
CAPACITIES = (16, 40)
# Submodels of the T5, and of an MHE pair whose submodels keep fewer heads, of their texts and of prompts.
SMALL = "ffn8x1_24x1_16x1"
WHOLE_PAIR, NARROW_PAIR = "ffn48-heads4-cross_heads4", "ffn48-heads4x1_3x1-cross_heads2"
# The most tokens of a prompt with which plans are checked: with thousands it takes long.
_MOST_CHECKED = 48
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


def source_folder(factory: pytest.TempPathFactory) -> Path:
    """The folders ``t5`` and ``pair``, each with ``graphs`` for TensorRT and with ``plans``, which has plans beside
    them as ``played_gpu`` builds them, and ``pair/processor``, compiled for ONNX Runtime; the T5's is ``t5.bundle`` of
    ``t5_folder``. Only to be read."""
    t5 = t5_folder(factory)

    def make(folder: Path) -> None:
        compile_plans(t5 / "t5", folder / "t5", [SMALL], "1x16", {"ffn": (1.0,)})
        pair = save_tiny_pair(folder / "model", attention="mha", nested=True)
        levels = dict.fromkeys(("ffn", "heads", "cross_heads"), (1.0,))
        compile_plans(pair, folder / "pair", [NARROW_PAIR], "1x8", levels)
        options: dict[str, Any] = {"submodels": [NARROW_PAIR], "levels": levels, "generate": True, "measure": False}
        device = board(budgets={"full": {}}, buckets=["1x8"])
        nestforge.compile(pair, device, folder / "pair" / "processor", **options)

    return made_once(factory, "source-plans", make)


def compile_plans(
    model: Path, folder: Path, submodels: list[str], bucket: str, levels: dict[str, Sequence[float]]
) -> None:
    """``graphs`` of the ``model`` and its ``submodels``, and ``plans``."""
    device = board(backend="tensorrt", capacities=list(CAPACITIES), budgets={"full": {}}, buckets=[bucket])
    options: dict[str, Any] = {"levels": levels, "include": "budgets", "emit_only": True, "submodels": submodels}
    nestforge.compile(model, device, folder / "graphs", generate=True, **options)
    shutil.copytree(folder / "graphs", folder / "plans")
    with played_gpu(folder), few_prompt_tokens():
        build_plans(folder / "plans")


@contextmanager
def few_prompt_tokens() -> Iterator[None]:
    """Plans that read prompts are checked with short ones alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_plan, "_MOST_SCORES", 4 * _MOST_CHECKED**2)
        yield
