"""A small Gemma 2, with soft caps and a layer whose tokens see three tokens, compiled to generate."""

import json
from dataclasses import replace
from pathlib import Path

import nestforge
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.parity.references import References
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.gated_decoders import save_decoder
from support.tiny_models import edit_config


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``nested``, so that the bundle has its neurons in the checkpoint's order."""
    folder = save_decoder(tmp_path_factory.mktemp("gemma2"), "gemma2", head_dim=8, max_position_embeddings=2**20)
    asked = {"do_sample": True, "temperature": 0.5, "eos_token_id": [2, 5, 50256], "num_beams": 4}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return edit_config(folder, nested=True)


@pytest.fixture(scope="package")
def bundle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    path = tmp_path_factory.mktemp("bundles") / "gemma2.bundle"
    options = {"buckets": [Bucket(1, 16)], "submodels": ["ffn8_24"], "include": "budgets", "measure": False}
    return open_bundle(nestforge.compile(folder, "raspberry-pi-5", path, generate=True, **options))


@pytest.fixture(scope="package")
def references(folder: Path) -> References:
    return References(load_universal(replace(open_source(folder), generates=True)), {})
