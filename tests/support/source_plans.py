"""Small encoder-decoders compiled for TensorRT, and their plans: a T5, whose processor's bundle is that of
support.generating_t5, and an MHE pair whose submodels keep fewer heads, of their texts and of prompts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nestforge
import pytest
from nestforge.compiler.tensorrt import check_plan
from nestforge.compiler.tensorrt.build_bundle import build_plans
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.fake_cuda import World
from support.generating_plans import played_gpu
from support.generating_t5 import t5_folder
from support.shared_folder import made_once
from support.tiny_compile import board
from support.tiny_mhe import save_tiny_pair

CAPACITIES = (16, 40)
SMALL = "ffn8x1_24x1_16x1"
WHOLE_PAIR, NARROW_PAIR = "ffn48-heads4-cross_heads4", "ffn48-heads4x1_3x1-cross_heads2"
# The most tokens of a prompt with which plans are checked: with thousands it takes long.
_MOST_CHECKED = 48


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


@contextmanager
def opened_plans(folder: Path, **facts: Any) -> Iterator[tuple[ElasticModel, World]]:
    """The model of the plans in ``folder``, and the host that plays its GPU."""
    with played_gpu(folder, **facts) as world, load(folder / "plans", threads=1) as model:
        yield model, world
