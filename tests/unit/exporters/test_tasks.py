"""A parameter that the model ties is no task's: PEFT unties it, and engines have it once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.exporters.adapter_folder import CONFIG_NAME, WEIGHTS_NAME
from nestforge.exporters.source import open_source
from nestforge.exporters.tasks import with_tasks
from nestforge.exporters.universal import load_universal
from safetensors.torch import load_file, save_file

LLAMA = Path(__file__).parents[2] / "golden" / "peft" / "llama"


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_tied_parameter_that_was_trained_whole_is_refused(tmp_path: Path, is_tied: bool) -> None:
    base, adapter = (Path(shutil.copytree(LLAMA / name, tmp_path / name)) for name in ("base", "b"))
    config = base / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": is_tied}))
    weights = load_file(base / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    weights.pop("lm_head.weight", None)
    save_file(weights if is_tied else {**weights, "lm_head.weight": table + 1}, base / "model.safetensors")
    config = adapter / CONFIG_NAME
    config.write_text(json.dumps({**json.loads(config.read_text()), "modules_to_save": ["embed_tokens"]}))
    pairs = load_file(adapter / WEIGHTS_NAME)
    saved = {**pairs, "base_model.model.model.embed_tokens.weight": torch.ones_like(table)}
    save_file(saved, adapter / WEIGHTS_NAME)
    source, tasks = with_tasks(open_source(base), {"b": adapter})
    assert "model.embed_tokens.weight" in tasks["b"].tensors
    if not is_tied:
        load_universal(source)
        return
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight is tied to lm_head\.weight, and"):
        load_universal(source)


def test_a_pair_beside_a_layer_in_parts_is_one_beside_each(tmp_path: Path) -> None:
    import transformers

    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id"), 1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.ModernBertConfig(**sizes, **tokens, vocab_size=40, max_position_embeddings=16)
    transformers.ModernBertModel(config).save_pretrained(tmp_path / "m")
    (tmp_path / "a").mkdir()
    stated = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["Wi"]}
    (tmp_path / "a" / CONFIG_NAME).write_text(json.dumps(stated))
    down, up = torch.randn(2, 16), torch.randn(48, 2)
    at = "base_model.model.layers.0.mlp.Wi"
    save_file({f"{at}.lora_A.weight": down, f"{at}.lora_B.weight": up}, tmp_path / "a" / WEIGHTS_NAME)
    source, tasks = with_tasks(open_source(tmp_path / "m"), {"a": tmp_path / "a"})
    for number, rows in enumerate(up.chunk(2)):
        part = f"layers.0.mlp.Wi.parts.{number}"
        np.testing.assert_array_equal(tasks["a"].tensors[f"{part}.lora_A.weight"], down)
        np.testing.assert_array_equal(tasks["a"].tensors[f"{part}.lora_B.weight"], rows)
    assert source.architecture.parameter_shapes["layers.0.mlp.Wi.parts.1.lora_B.weight"] == (24, 2)
