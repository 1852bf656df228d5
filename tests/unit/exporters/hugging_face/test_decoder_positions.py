"""Rotary positions that a longer text changes: where engines end, and that they are transformers' own up to there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from nestforge.bucket import Bucket
from nestforge.errors import CheckpointError, ExportError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint
from nestforge.exporters.families.decoder_types import LAYOUTS
from nestforge.exporters.families.gated_decoder import read_decoder_model
from nestforge.exporters.hugging_face.decoder_positions import constant_positions, read_windows
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.gated_decoders import TINY, make_decoder, save_decoder

_LONG = {"rope_type": "longrope", "rope_theta": 1e3, "short_factor": [1.5, 2.0], "long_factor": [4.0, 9.0]}
_BY_LAYER = {
    "full_attention": {**_LONG, "original_max_position_embeddings": 12},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
# Models with 40 positions: model type, keys of config.json, and how many positions are constant.
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "longrope": ("llama", {"rope_parameters": {**_LONG, "original_max_position_embeddings": 12}}, 12),
    "outside": ("mistral", {"rope_parameters": _LONG, "original_max_position_embeddings": 12}, 12),
    "by layer type": ("gemma3_text", {"rope_parameters": _BY_LAYER}, 12),
    "never long": ("qwen3", {"rope_parameters": _LONG}, 40),
    "phi-3": (
        "phi3",
        {"rope_parameters": _LONG, "original_max_position_embeddings": 12, "partial_rotary_factor": 1},
        12,
    ),
    "su": (
        "phi3",
        {
            "rope_scaling": {
                "type": "su",
                "short_factor": [1.5],
                "long_factor": [4.0],
                "original_max_position_embeddings": 12,
            },
            "original_max_position_embeddings": 12,
        },
        12,
    ),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 4.0}}, 40),
}


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers_up_to_where_a_longer_text_changes_them(
    tmp_path: Path, kind: str
) -> None:
    model_type, keys, positions = KINDS[kind]
    source = open_source(save_decoder(tmp_path / "m", model_type, **keys))
    assert source.signature.max_sequence == positions
    ids = torch.arange(positions)[None] % 48
    (found,) = load_universal(source).module(ids)
    torch.testing.assert_close(found, make_decoder(model_type, **keys)(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize("kind", [kind for kind, (*_, positions) in KINDS.items() if positions < 40])
def test_a_longer_text_is_another_one_from_its_first_token_on(kind: str) -> None:
    """The reason why engines end there: transformers turns earlier tokens anew."""
    model_type, keys, positions = KINDS[kind]
    model, ids = make_decoder(model_type, **keys), torch.arange(positions + 1)[None] % 48
    longer = model(input_ids=ids, use_cache=False).logits[:, :-1]
    assert not torch.allclose(longer, model(input_ids=ids[:, :-1], use_cache=False).logits, atol=1e-3)


def test_longer_texts_are_refused_with_the_reason(tmp_path: Path) -> None:
    model_type, keys, _ = KINDS["longrope"]
    signature = open_source(save_decoder(tmp_path / "m", model_type, **keys)).signature
    with pytest.raises(
        ExportError, match="at most 12 tokens: rotary positions change for texts of more, up to the 40 stated"
    ):
        signature.buckets([Bucket(1, 13)], [])


def test_phi_3_has_an_original_length_that_its_files_may_leave_out() -> None:
    config = {"rope_scaling": {"type": "longrope"}}
    assert constant_positions(config, 131_072, original=4096) == 4096
    assert constant_positions({}, 131_072, original=4096) == 131_072
    assert constant_positions({"rope_scaling": {"type": "yarn"}}, 131_072, original=None) == 131_072
    assert constant_positions({"rope_scaling": {"type": "yarn"}}, 131_072, original=4096) == 4096


def test_a_class_that_reads_the_configuration_otherwise_is_refused(tmp_path: Path) -> None:
    """Present and earlier name contradict each other."""
    model_type, keys, _ = KINDS["longrope"]
    folder = save_decoder(tmp_path / "m", model_type, **keys)
    source = open_source(folder)
    config = dict(source.checkpoint.config)
    assert constant_positions({**config, "original_max_position_embeddings": 20}, 40, None) == 20
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"original_max_position_embeddings": 12', '"factor": 2.0'))
    source = open_source(folder)
    assert source.signature.max_sequence == 40
    (folder / "config.json").write_text(text)  # changed between headers and weights
    with pytest.raises(CheckpointError, match="'longrope' change after 12 tokens, where 40 were expected"):
        load_universal(source)


LEFT_OVER = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 0}
FULL = {"layer_types": ["full_attention", "full_attention"]}
CASES: list[tuple[str, dict[str, Any], int | None]] = [
    ("llama", LEFT_OVER, None),
    ("gemma", LEFT_OVER, None),
    ("mistral", {}, 4096),
    ("mistral", {"sliding_window": None}, None),
    ("mistral", {"sliding_window": 3, "use_sliding_window": False}, 3),
    ("phi3", {}, None),
    ("phi3", {"sliding_window": 3, "use_sliding_window": False}, 3),
    ("qwen2", {"sliding_window": 3, "max_window_layers": 0}, None),
    ("qwen2", {"sliding_window": 3, "use_sliding_window": True}, None),  # from the 28th layer on
    ("qwen2", {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}, 3),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, 4096),
    ("qwen3", {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 0, **FULL}, None),
    ("gemma2", {"sliding_window": 3}, 3),
    ("gemma2", {"sliding_window": 3, "num_hidden_layers": 1}, 3),
    ("gemma2", {"sliding_window": 3, **FULL}, None),
    ("gemma3_text", {"sliding_window": 3}, 3),
    ("gemma3_text", {"sliding_window": 3, "sliding_window_pattern": 1}, None),
    ("gemma3_text", {"sliding_window": 3, **FULL}, None),
    ("gemma3n_text", {}, 512),
]


@pytest.mark.parametrize(("model_type", "stated", "window"), CASES, ids=str)
def test_a_window_is_what_the_class_has(model_type: str, stated: dict[str, Any], window: int | None) -> None:
    config = {**TINY, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 40, "model_type": model_type, **stated}
    found = read_decoder_model(Checkpoint(Path("m"), {**config, "architectures": None}, {}, missing="untrained"))
    assert max((each for each in found.windows if each is not None), default=None) == window
    assert list(found.windows) == windows_of_the_class(config)


def windows_of_the_class(config: dict[str, Any]) -> list[int | None]:
    """Inputs of each layer's attention."""
    given: list[int | None] = []

    def attend(_module: Any, query: torch.Tensor, *_others: Any, **how: Any) -> Any:
        given.append(how.get("sliding_window"))
        return torch.zeros_like(query).transpose(1, 2), None

    transformers.AttentionInterface.register("windows", attend)
    made = transformers.AutoConfig.for_model(**config)
    made._attn_implementation = "windows"
    model = transformers.AutoModel.from_config(made)
    model(input_ids=torch.tensor([[5, 7]]))
    return given


def test_positions_that_see_later_ones_have_half_a_window_to_each_side() -> None:
    config = {"num_hidden_layers": 2, "sliding_window": 7, "use_bidirectional_attention": True}
    made = transformers.Gemma3TextConfig(**config)
    assert made.sliding_window == 4
    assert read_windows(LAYOUTS["gemma3_text"].window, config, 2, "config.json") == (4, 4)


def test_layers_without_a_type_are_refused() -> None:
    config = {"num_hidden_layers": 3, "sliding_window": 7, "layer_types": ["full_attention"] * 2}
    line = "config.json: layer_types: expected one for each of 3 layers, got 2"
    with pytest.raises(CheckpointError, match=f"^{line}$"):
        read_windows(LAYOUTS["gemma3_text"].window, config, 3, "config.json")
