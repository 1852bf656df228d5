"""A class whose passes assert of numbers compiles; its own passes assert as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.exporters.source import open_source
from support.tiny_compile import board

SIZES = {"vocab_size": 64, "emb_dim": 16, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 24}


def test_xlm_asserts_lengths_in_passes_with_numbers_alone(tmp_path: Path) -> None:
    """It also makes a cache whatever is asked, which a part by itself is not given."""
    torch.manual_seed(0)
    model = transformers.XLMModel(transformers.XLMConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path / "m")
    assert [(axis.kind, axis.size) for axis in open_source(tmp_path / "m").spec.axes] == [("heads", 2), ("ffn", 64)]
    profile = board(budgets={"full": {}})
    levels = {"ffn": [1], "heads": [1]}
    folder = compile_bundle(
        model=tmp_path / "m", output=tmp_path / "out", profile=profile, buckets=["2x4"], levels=levels
    )
    assert [engine.submodel for engine in open_bundle(folder).manifest.engines] == ["heads2-ffn64"]
    with pytest.raises(AssertionError):
        model(torch.ones((2, 4), dtype=torch.int64), lengths=torch.tensor([4, 5]))
