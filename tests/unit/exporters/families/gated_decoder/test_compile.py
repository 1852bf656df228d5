"""Every layout on its way through the compiler: sliced, equal to PyTorch, and proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nestforge.bundle.manifest import Ranking
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.exporters.families.gated_decoder.family import FAMILY
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.gated_decoders import edit_config, save_decoder
from support.tensorrt_takes import assert_tensorrt_takes
from support.tiny_compile import BUCKET, board, builder_in, template_of

PROFILE = board(budgets={"full": {}})
_LONGER = {"rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 10}
_LLAMA3 = {**_LONGER, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# One layer where all are alike, for speed; kinds of rotary positions shared out; gemma3n_text has its own test below.
LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1, "rope_parameters": _LLAMA3},
    "mistral": {"num_hidden_layers": 1},
    "qwen3": {"num_hidden_layers": 1, "rope_parameters": {**_LONGER, "rope_type": "yarn"}},
    "phi3": {
        "num_hidden_layers": 1,
        "original_max_position_embeddings": 10,
        "rope_parameters": {"rope_type": "longrope", "short_factor": [1.5], "long_factor": [4.0]},
    },
    "gemma": {"num_hidden_layers": 1, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e3, "factor": 4.0}},
    "qwen2": {"num_hidden_layers": 1, "max_window_layers": 0},
    "gemma2": {},
    "gemma3_text": {},
}


def test_every_layout_is_tested() -> None:
    assert {*LAYOUTS, "gemma3n_text"} == set(FAMILY.model_types)


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_every_layout_is_sliced_and_equals_pytorch(tmp_path: Path, model_type: str) -> None:
    universal = load_universal(open_source(save_decoder(tmp_path / "m", model_type, **LAYOUTS[model_type])))
    template = template_of(universal)
    assert template.slice_problem is None
    # A tied head is one tensor, under the name that the module gives it first.
    assert "model.embed_tokens.weight" in template.weights
    assert ("lm_head.weight" in template.weights) is not universal.module.model.config.tie_word_embeddings
    builder = builder_in(tmp_path / "bundle", universal, template, PROFILE)
    for widths in ([8, 16], [32, 32]):
        submodel = universal.spec.from_kinds({"ffn": widths[: len(universal.spec.axes)]})
        entry = builder.build(submodel, BUCKET)
        assert (entry.emitted, entry.slice_problem) == ("sliced", None)
        assert entry.parity is not None
    assert_tensorrt_takes(tmp_path / "bundle")


def test_gemma_3n_compiles_and_keeps_its_order(tmp_path: Path) -> None:
    """One layer is sparse: its slice is proven with that layer narrowed on both sides."""
    folder = edit_config(
        save_decoder(tmp_path / "m", "gemma3n_text"),
        granularities={"ffn": [0.5, 1]},
    )
    manifest = open_bundle(compile_bundle(folder, PROFILE, tmp_path / "b")).manifest
    assert {engine.id: engine.emitted for engine in manifest.engines} == {
        f"ffn16x1_8x1_16x1@{BUCKET.label}": "sliced",
        f"ffn32x1_16x1_32x1@{BUCKET.label}": "sliced",
    }
    assert manifest.ranking == Ranking("none")
    (proof,) = [proof for proof in manifest.proofs if proof.suite == "slice"]
    assert proof.subject == "ffn16x1_8x1_16x1"
    assert 0 <= proof.worst <= proof.limit
    assert_tensorrt_takes(tmp_path / "b")
