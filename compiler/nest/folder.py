"""The nested model as an ordinary folder: its weights, its configuration, and what came with the original."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from ...bundle.files import to_json
from ...errors import CheckpointError
from ...exporters.checkpoints.checkpoint import Checkpoint
from ...exporters.sentence_transformers.read_modules import SentenceModules
from ...exporters.universal import PREFIX, UniversalModel
from ...strict import unstructure
from ..work.staging import Stage, write_synced
from .distill import trainable

RECORD_NAME = "nest.json"
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
# Tokenizer files, and files that say how texts are embedded; not the card, which is of another model.
_COPIED_PATTERNS = ("*.json", "*.txt", "*.model")
_SHARD_INDEX = re.compile(r".*\.index\.json")  # of weights in several files; here they are one


def refuse_unwritable(model: UniversalModel) -> None:
    """Raises CheckpointError if a weight that training changes is not in the checkpoint under its name and shape."""
    checkpoint = model.source.checkpoint
    for name, weight in trainable(model).items():
        place = model.source.architecture.place_in_files(name, tuple(weight.shape))
        header = checkpoint.tensors.get(place.tensor)
        if header is None or header.shape != place.shape:
            raise CheckpointError(
                f"{checkpoint.folder}: parameter {name} of the loaded model is not a tensor of the weights, so a "
                "trained one cannot be written back; save the model with its library's own save_pretrained first"
            )


def write_folder(model: UniversalModel, fractions: Mapping[str, Sequence[float]], stage: Stage) -> None:
    """Writes the folder that ``stage`` publishes: float32 weights under the checkpoint's own names."""
    checkpoint = model.source.checkpoint
    for path in _companions(checkpoint.folder, model.source.modules):
        target = stage.folder / path.relative_to(checkpoint.folder)
        target.parent.mkdir(exist_ok=True)
        write_synced(target, path.read_bytes())
    config = {
        **checkpoint.config,
        "_name_or_path": f"{checkpoint.name}-nested",
        "nested": True,
        "granularities": unstructure(fractions),
        **{key: "float32" for key in ("dtype", "torch_dtype") if key in checkpoint.config},
    }
    write_synced(stage.folder / _CONFIG, to_json(config))
    write_synced(stage.folder / _WEIGHTS, save(_weights(model), {"format": "pt"}))


def write_record(record: Mapping[str, Any], stage: Stage) -> None:
    """Writes beside it how the folder was made, and what its levels are worth."""
    write_synced(stage.folder / RECORD_NAME, to_json(record))


def _companions(folder: Path, modules: SentenceModules | None) -> list[Path]:
    """What the original folder holds besides weights, configuration and prose."""
    found = {path for pattern in _COPIED_PATTERNS for path in folder.glob(pattern)} - {folder / _CONFIG}
    found |= set(modules.files if modules else ())
    return sorted(path for path in found if path.is_file() and not _SHARD_INDEX.fullmatch(path.name))


def _weights(model: UniversalModel) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, as the module has it where it has one: tied copies under each of their names."""
    architecture = model.source.architecture
    plain = {name.removeprefix(PREFIX): data for name, data in model.module.state_dict().items()}
    loaded = {
        architecture.names_in_files.get(name, name): data.T if name in architecture.transposed else data
        for name, data in plain.items()
    }
    loaded |= {tensor: torch.cat([plain[part] for part in parts]) for tensor, parts in architecture.stacked.items()}
    tensors = {}
    for name, stored in _stored(model.source.checkpoint).items():
        data = loaded.get(name, stored)
        tensors[name] = (data.float() if data.is_floating_point() else data).clone().contiguous()
    return tensors


def _stored(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted({header.file for header in checkpoint.tensors.values()}):
        with safe_open(checkpoint.folder / file, framework="pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118  (not a dict)
    return tensors
