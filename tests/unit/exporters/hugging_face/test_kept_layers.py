"""What causal classes keep of each token, read off their configurations alone, and why others cannot generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.generation_entry import CachedLayer
from nestforge.compiler.job import resolve
from nestforge.errors import PlanError
from nestforge.exporters.parts import CacheAxes, CachedSpec
from nestforge.exporters.source import open_source
from nestforge.profiles.compile_request import CompileRequest

HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {"vocab_size": 64, "max_position_embeddings": 64}
SHARED = {**HEADS, **TEXT, "num_key_value_heads": 2}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_ssm": 64, "mamba_d_state": 8}


def save_config(folder: Path, class_name: str, model_type: str, **settings: Any) -> Path:
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **settings)
    config.architectures = [class_name]
    config.save_pretrained(folder)
    return folder


def kept(folder: Path, class_name: str, model_type: str, **settings: Any) -> CachedSpec:
    found = open_source(save_config(folder, class_name, model_type, **settings)).architecture.cached
    assert found is not None
    return found


def test_windows_are_those_of_the_masks_and_heads_shrink_with_their_axis(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"]
    found = kept(tmp_path, "Olmo3ForCausalLM", "olmo3", sliding_window=9, layer_types=types, **SHARED)
    assert found.layers == (CachedLayer(2, 8, 9), CachedLayer(2, 8))
    assert (found.vocabulary, found.positions, found.is_buffered, found.problem) == (64, 64, False, None)
    # Its queries and keys are measured across heads.
    assert found.cache_axes == ()
    shared = kept(tmp_path, "GlmForCausalLM", "glm", head_dim=8, pad_token_id=0, **SHARED)
    assert shared.layers == (CachedLayer(2, 8),) * 2
    assert shared.cache_axes == (CacheAxes("layers.0.heads"), CacheAxes("layers.1.heads"))


def test_what_the_operator_lacks_is_read_from_buffers(tmp_path: Path) -> None:
    sinks = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "sliding_window": 9}
    found = kept(tmp_path, "GptOssForCausalLM", "gpt_oss", pad_token_id=0, **sinks, **SHARED)
    # Its masks have the windows, and every token stays.
    assert (found.layers, found.is_buffered) == ((CachedLayer(2, 8),) * 2, True)
    # Queries of several values to one key are no sharing of heads.
    assert kept(tmp_path, "DiffLlamaForCausalLM", "diffllama", head_dim=8, **SHARED).is_buffered


def test_numbers_of_a_head_are_made_a_multiple_of_eight(tmp_path: Path) -> None:
    found = kept(tmp_path, "OPTForCausalLM", "opt", hidden_size=24, ffn_dim=32, num_attention_heads=4, **TEXT)
    assert set(found.layers) == {CachedLayer(4, 8)}


@pytest.mark.parametrize(
    ("class_name", "model_type", "settings", "why"),
    [
        (
            "MambaForCausalLM",
            "mamba",
            {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 64},
            r"MambaForCausalLM takes no cache of keys and values \(past_key_values\)",
        ),
        (
            "FalconH1ForCausalLM",
            "falcon_h1",
            {**SHARED, **STATES},
            "layer 0 of FalconH1ForCausalLM keeps a LinearAttentionAndFullAttentionLayer, which is no keys and values",
        ),
        (
            "CpmAntForCausalLM",
            "cpmant",
            {"hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48, "num_hidden_layers": 1},
            "CpmAntForCausalLM takes no static cache: ",
        ),
    ],
)
def test_why_a_class_cannot_generate(
    tmp_path: Path, class_name: str, model_type: str, settings: dict[str, Any], why: str
) -> None:
    folder = save_config(tmp_path / "m", class_name, model_type, **settings)
    request = CompileRequest(model=folder, output=tmp_path / "b", profile="raspberry-pi-5", generate=True)
    with pytest.raises(PlanError, match=f"generate: m cannot: {why}"):
        resolve(request)


def test_buffers_are_no_plans(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_hidden_size": 48}
    folder = save_config(tmp_path / "m", "FalconForCausalLM", "falcon", **sizes, **TEXT)
    request = CompileRequest(
        model=folder, output=tmp_path / "b", profile="jetson-orin-nano-8gb", buckets=[Bucket(1, 16)], generate=True
    )
    with pytest.raises(PlanError, match="generate: m cannot for tensorrt: its class has attention of its own"):
        resolve(request)
