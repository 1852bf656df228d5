"""A small Llama with a tokenizer, and with engines that keep a cache."""

from __future__ import annotations

import json
from pathlib import Path

import nestforge
from support.chat_templates import CHATML
from support.gated_decoders import save_decoder
from support.trained_tokenizers import byte_level

VOCABULARY = 512


def save_text_llama(folder: Path, chats: bool = False) -> Path:
    """With 256 positions and, if it ``chats``, a chat template."""
    save_decoder(folder, vocab_size=VOCABULARY, head_dim=8, max_position_embeddings=256)
    byte_level().save(str(folder / "tokenizer.json"))
    if chats:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    return folder


def compile_generating(model: Path, output: Path) -> Path:
    """The bundle of ``model``: levels S to XL, ffn8 to ffn32."""
    return nestforge.compile(model, "raspberry-pi-5", output, generate=True, measure=False)
