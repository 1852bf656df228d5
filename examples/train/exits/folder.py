"""Writes a trained model as a ``cost_eff`` folder (docs/cost-eff.md), and reads one back to train on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from ....exporters.checkpoints.checkpoint import open_checkpoint
from ....exporters.families.cost_eff.architecture import CostEffArchitecture
from ....exporters.families.cost_eff.model import CostEffModel
from ....exporters.families.cost_eff.read_architecture import read_architecture
from ....exporters.families.cost_eff.sidecar import SCHEMA_VERSION, SIDECAR_NAME, EmbeddingSpec, Sidecar, read_sidecar
from ....strict import unstructure

_WEIGHTS = "model.safetensors"


def save_model(model: CostEffModel, tokenizer: Path, folder: Path) -> None:
    """Makes ``folder``: configuration, sidecar, weights as they are (sliced, float32), and a copy of ``tokenizer``.

    There is no gate: thresholds are calibrated on the deployed engines.
    """
    folder.mkdir(parents=True)
    architecture = model.architecture
    embedding = EmbeddingSpec("factorised" if architecture.rank else "dense", architecture.rank)
    sidecar = Sidecar(SCHEMA_VERSION, "bert-post-ln", embedding, architecture.exits)
    _write_json(folder / "config.json", _config(architecture))
    _write_json(folder / SIDECAR_NAME, unstructure(sidecar))
    weights = {name: data.detach().contiguous() for name, data in model.state_dict().items()}
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
    shutil.copyfile(tokenizer, folder / "tokenizer.json")


def load_model(folder: Path) -> CostEffModel:
    """The model that ``save_model`` wrote; its parameters can train.

    Raises CheckpointError if the folder is damaged.
    """
    model = CostEffModel(read_architecture(open_checkpoint(folder), read_sidecar(folder)))
    model.load_state_dict(load_file(folder / _WEIGHTS))
    return model


def _config(architecture: CostEffArchitecture) -> dict[str, Any]:
    heads, ffn = [list(column) for column in zip(*((w.heads, w.ffn) for w in architecture.layers), strict=True)]
    return {
        "model_type": "cost_eff",
        "vocab_size": architecture.vocabulary,
        "hidden_size": architecture.hidden,
        "num_hidden_layers": len(architecture.layers),
        "num_attention_heads": heads[0] if len(set(heads)) == 1 else heads,
        "head_size": architecture.head_size,
        "intermediate_size": ffn[0] if len(set(ffn)) == 1 else ffn,
        "hidden_act": architecture.activation,
        "layer_norm_eps": architecture.norm_eps,
        "max_position_embeddings": architecture.positions,
        "type_vocab_size": architecture.types,
        "pad_token_id": architecture.pad,
    }


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
