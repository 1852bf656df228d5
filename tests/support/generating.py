"""A small Llama and a small T5 with tokenizers, compiled with KV-cache engines; and what transformers generates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nestforge
import pytest
import torch
from nestforge.bucket import Bucket
from support.gated_decoders import edit_config, save_decoder
from support.shared_folder import made_once
from support.tiny_t5 import V1_1, save_t5
from support.tokenizer_files import CHATML, byte_level

VOCABULARY = 512


def save_text_llama(folder: Path) -> Path:
    """With 256 positions."""
    save_decoder(folder, vocab_size=VOCABULARY, head_dim=8, max_position_embeddings=256)
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    return folder


def llama_folder(factory: pytest.TempPathFactory) -> Path:
    """The folder ``model`` and what is compiled of it, ``bundle``: levels S to XL, ffn8 to ffn32. Only to be read."""

    def make(folder: Path) -> None:
        options = {"buckets": [Bucket(1, 16)], "generate": True, "measure": False}
        nestforge.compile(save_text_llama(folder / "model"), "raspberry-pi-5", folder / "bundle", **options)

    return made_once(factory, "llama", make)


def t5_folder(factory: pytest.TempPathFactory) -> Path:
    """The folder ``t5``, of a model with a head of its own and a gate, and what is compiled of it, ``t5.bundle``: the
    order of its neurons is kept. Only to be read."""

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


def greedy(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    """The ``tokens`` behind ``prompt`` of the language model in ``folder``."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    found = module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return list(found[0, len(prompt) :].tolist())
