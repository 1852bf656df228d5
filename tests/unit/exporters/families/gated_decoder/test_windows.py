"""The window that a configuration gives attention, against what transformers' class passes to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint
from nestforge.exporters.families.gated_decoder.layouts import LAYOUTS
from nestforge.exporters.families.gated_decoder.read_architecture import read_architecture
from nestforge.exporters.families.gated_decoder.windows import read_windows
from support.gated_decoders import TINY

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
    found = read_architecture(Checkpoint(Path("m"), {**config, "architectures": None}, {}, missing="untrained"))
    assert max((each for each in found.windows if each is not None), default=None) == window
    assert list(found.windows) == windows_of_the_class(config)


def windows_of_the_class(config: dict[str, Any]) -> list[int | None]:
    """What each layer's attention is given."""
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
