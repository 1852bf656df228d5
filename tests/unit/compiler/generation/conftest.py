"""A small Mistral whose tokens see three tokens, compiled with engines that keep a cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import nestforge
import pytest
from nestforge.compiler.parity.references import References
from nestforge.elastic import Bucket
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.runtime.bundle.open_bundle import Bundle, open_bundle
from support.gated_decoders import edit_config, save_decoder


@pytest.fixture(scope="package")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``nested``, so that the bundle has its neurons in the checkpoint's order."""
    folder = tmp_path_factory.mktemp("mistral")
    return edit_config(save_decoder(folder, "mistral", head_dim=8, max_position_embeddings=2**20), nested=True)


@pytest.fixture(scope="package")
def bundle(mistral: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    path = tmp_path_factory.mktemp("bundles") / "mistral.bundle"
    options = {"buckets": [Bucket(1, 16, None, 1)], "submodels": ["ffn8_24"], "include": "budgets", "measure": False}
    return open_bundle(nestforge.compile(mistral, "raspberry-pi-5", path, generate=True, **options))


@pytest.fixture(scope="package")
def references(mistral: Path) -> References:
    return References(load_universal(replace(open_source(mistral), generates=True)), {})
