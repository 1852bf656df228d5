"""A small Llama with a tokenizer and a chat template, and with engines that keep a cache."""

from __future__ import annotations

import json
from pathlib import Path

import nestforge
import pytest
from nestforge.bucket import Bucket
from support.chat_templates import CHATML
from support.gated_decoders import save_decoder
from support.shared_folder import made_once
from support.trained_tokenizers import byte_level

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
