"""What causal classes keep of each token, read off their configurations alone, and why others cannot generate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.generation_entry import CachedLayer
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.compiler.job import resolve
from nestforge.elastic import Axis, PrefixSlice
from nestforge.errors import PlanError
from nestforge.exporters.checkpoints.checkpoint import open_checkpoint
from nestforge.exporters.hugging_face.found_axes import FoundAxes
from nestforge.exporters.hugging_face.interface import Loading
from nestforge.exporters.hugging_face.kept_layers import KeptLayers, find_kept
from nestforge.exporters.hugging_face.survey import Survey, kept_by, survey
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


def test_states_are_kept_alone_and_beside_keys_and_values(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 64}
    alone = kept(tmp_path / "mamba", "MambaForCausalLM", "mamba", **sizes)
    assert (alone.layers, alone.states, alone.is_buffered) == ((), ((32, 4), (32, 4)), False)
    assert (alone.bucket, alone.problem) == (Bucket(64, 1, 1), None)
    # Of one layer both, and a window.
    both = kept(tmp_path / "falcon", "FalconH1ForCausalLM", "falcon_h1", **{**SHARED, **STATES, "mamba_n_groups": 1})
    assert both.layers == (CachedLayer(2, 8),) * 2
    assert both.states == ((80, 4), (8, 8, 8)) * 2


@pytest.mark.parametrize(
    ("class_name", "model_type", "settings", "why"),
    [
        (
            "RwkvForCausalLM",
            "rwkv",
            {"hidden_size": 16, "num_hidden_layers": 1, "attention_hidden_size": 16, "vocab_size": 64},
            r"RwkvForCausalLM takes no cache of transformers' \(past_key_values\)",
        ),
        (
            "CpmAntForCausalLM",
            "cpmant",
            {"hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48, "num_hidden_layers": 1},
            "CpmAntForCausalLM takes no static cache: ",
        ),
        (
            "GPTNeoForCausalLM",
            "gpt_neo",
            {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "attention_types": [[["local"], 1]], **TEXT},
            "GPTNeoForCausalLM takes new tokens for the last of its keys",
        ),
        (
            "MiniMaxForCausalLM",
            "minimax",
            {**SHARED, "head_dim": 8, "block_size": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
            "MiniMaxForCausalLM keeps a MiniMaxCache of its own",
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


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Survey:
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4, "num_hidden_layers": 1, **TEXT}
    folder = save_config(tmp_path_factory.mktemp("opt"), "OPTForCausalLM", "opt", **sizes)
    return survey(open_checkpoint(folder, untrained=True), Loading(surveyed=True))


def asked_of(opt: Survey, axes: FoundAxes | None = None, model: Any = None) -> KeptLayers | str:
    with opt.fake:
        ids = torch.ones((2, 12), dtype=torch.int64)
        return find_kept(opt.module.model if model is None else model, ids, ids, axes or opt.axes, 64)


def test_heads_of_a_cache_are_steps_of_an_axis(opt: Survey) -> None:
    found = asked_of(opt)
    assert isinstance(found, KeptLayers)
    assert (found.is_fused, found.cache_axes) == (True, (CacheAxes("layers.0.heads"),))
    attention = "model.decoder.layers.0.self_attn"
    pairs = FoundAxes((Axis("layers.0.heads", 2),), counts={(attention, "head_dim"): ("layers.0.heads", 4)})
    assert asked_of(opt, pairs) == "cut to fewer heads it keeps other numbers of each"
    linears = [PrefixSlice(f"{attention}.{name}_proj.weight", 0, "layers.0.heads", 16) for name in "qkv"]
    linears += [PrefixSlice(f"{attention}.{name}_proj.bias", 0, "layers.0.heads", 16) for name in "qkv"]
    linears += [PrefixSlice(f"{attention}.out_proj.weight", 1, "layers.0.heads", 16)]
    counts = {(attention, "num_heads"): ("layers.0.heads", 2), (attention, "embed_dim"): ("layers.0.heads", 16)}
    doubled = FoundAxes((Axis("layers.0.heads", 2),), tuple(linears), counts=counts)
    assert asked_of(opt, doubled) == "layer 0 keeps 4 heads, which are not the steps of one axis"


def test_a_class_must_return_its_cache(opt: Survey) -> None:
    class Forgetful(torch.nn.Module):
        config = opt.module.model.config

        def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
            return SimpleNamespace(past_key_values=past_key_values)

    class Broken(Forgetful):
        def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
            raise ValueError("no cache today")

    assert asked_of(opt, model=Forgetful()) == "Forgetful returns no cache of keys and values"
    assert asked_of(opt, model=Broken()) == "Broken fails with a cache: no cache today"


def test_a_text_goes_in_and_tokens_come_out(opt: Survey) -> None:
    def why(**changes: Any) -> object:
        return kept_by(opt.module.model, opt.fake, replace(opt.signature, **changes), opt.axes)

    pixels = TensorSpec("pixel_values", "float32", ("batch", 3, 8, 8))
    assert why(inputs=(*opt.signature.inputs, pixels)) == "OPTForCausalLM takes pixel_values beside the text"
    scores = TensorSpec("logits", "float32", ("batch", "sequence", 63), role="next_tokens")
    assert why(outputs=(scores,)) == "OPTForCausalLM reads 64 tokens and scores 63"
    assert why(outputs=(replace(scores, role=None),)) is None


def test_buffers_are_no_plans(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_hidden_size": 48}
    folder = save_config(tmp_path / "m", "FalconForCausalLM", "falcon", **sizes, **TEXT)
    request = CompileRequest(
        model=folder, output=tmp_path / "b", profile="jetson-orin-nano-8gb", buckets=[Bucket(1, 16)], generate=True
    )
    with pytest.raises(PlanError, match="generate: m cannot for tensorrt: its class has attention of its own"):
        resolve(request)
