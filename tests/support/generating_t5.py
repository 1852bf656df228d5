"""A small T5 with a tokenizer, compiled with engines that generate, and what transformers generates with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nestforge
import pytest
import torch
from nestforge.bucket import Bucket
from support.shared_folder import made_once
from support.tiny_t5 import V1_1, save_t5


def t5_folder(factory: pytest.TempPathFactory) -> Path:
    """The folder ``t5``, of a model with a head of its own and a gate, and what is compiled of it, ``t5.bundle``: the
    order of its neurons is kept. Only to be read."""
    from support.gated_decoders import edit_config

    def make(folder: Path) -> None:
        compile_t5(edit_config(save_t5(folder / "t5", **V1_1), nested=True), folder / "t5.bundle")

    return made_once(factory, "t5", make)


def compile_t5(model: Path, output: Path, **options: Any) -> Path:
    """The bundle of ``model``: ffn32, and a submodel whose layers have widths of their own."""
    common = {"buckets": [Bucket(1, 16)], "include": "budgets", "measure": False}
    submodels = ["ffn8x1_24x1_16x1"]
    return nestforge.compile(
        model, "raspberry-pi-5", output, generate=True, **{**common, "submodels": submodels, **options}
    )


def generated_by_transformers(folder: Path, prompt: Sequence[int], tokens: int) -> list[int]:
    """The ``tokens`` most likely ones behind ``prompt``, and no more than the text has."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    module: Any = transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    # Its cache has as many layers as the encoder, which here has fewer than the decoder.
    found = module.generate(torch.tensor([list(prompt)]), max_new_tokens=tokens, do_sample=False, use_cache=False)
    return list(found[0, 1:].tolist())
