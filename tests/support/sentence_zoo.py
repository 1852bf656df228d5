"""Folders of sentence-transformers on a tiny BERT: mean pooling with Normalize; cls; mean with Dense and Normalize."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_KINDS = {
    "mean": (("Pooling", {"pooling_mode_mean_tokens": True}), ("Normalize", None)),
    "cls": (("Pooling", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}),),
    "dense": (("Pooling", {"pooling_mode_mean_tokens": True}), ("Dense", {}), ("Normalize", None)),
}


def sentence_folder(folder: Path, model: Any, kind: str) -> Path:
    model.save_pretrained(folder)
    width = model.config.hidden_size
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for place, (name, settings) in enumerate(_KINDS[kind], 1):
        path = folder / f"{place}_{name}"
        path.mkdir()
        modules.append(
            {"idx": place, "name": str(place), "path": path.name, "type": f"sentence_transformers.models.{name}"}
        )
        if name == "Pooling":
            (path / "config.json").write_text(json.dumps({"word_embedding_dimension": width, **(settings or {})}))
        if name == "Dense":
            stated = {
                "in_features": width,
                "out_features": 16,
                "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh",
            }
            (path / "config.json").write_text(json.dumps(stated))
            torch.manual_seed(5)
            tensors = {"linear.weight": 0.3 * torch.randn(16, width), "linear.bias": 0.1 * torch.randn(16)}
            save_file(tensors, path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40, "do_lower_case": False}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]"})
    )
    return folder
