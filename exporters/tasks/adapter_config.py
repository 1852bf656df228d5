"""``adapter_config.json`` of Hugging Face's PEFT, read strictly: plain LoRA, and what else there is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...outside_file import read_file
from ...strict import parse_json

CONFIG_NAME = "adapter_config.json"
_MAX_BYTES = 2**20
_MAX_RANK = 2**16
# What may have any value: how training went, who wrote the file, and what the tensors say as well.
_OF_TRAINING = frozenset(
    [
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("lora_dropout", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core", "loftq_config"),
        *("eva_config", "qalora_group_size", "ensure_weight_tying", "runtime_config", "fan_in_fan_out"),
    ]
)
_READ = frozenset(
    [
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "bias"),
        *("modules_to_save", "init_lora_weights", "use_dora"),
    ]
)
# The others begin from another base than the one that they name.
_INITIAL = (True, False, "gaussian", "orthogonal", "eva")
# Of a pattern: names alone, in which PEFT escapes nothing. Other regular expressions are not run.
_LITERAL = re.compile(r"\^?[\w.-]+")


@dataclass(frozen=True)
class AdapterConfig:
    """``targets`` are names of modules, or None where the folder gives an expression; ``saved`` are modules that were
    trained whole. ``alphas`` and ``ranks`` are those of modules by their names, or ends of them."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    targets: tuple[str, ...] | None
    saved: tuple[str, ...]
    ranks: Mapping[str, float]
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """The rank of the pair beside ``module``."""
        return int(_of(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What the product of the pair is multiplied by: ``alpha / r``, or rank-stabilized ``alpha / sqrt(r)``."""
        rank, alpha = self.rank_of(module), _of(self.alphas, module, self.alpha)
        return alpha / sqrt(rank) if self.is_rank_stabilized else alpha / rank


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The configuration in ``folder``. Raises CheckpointError for anything but plain LoRA."""
    path = folder / CONFIG_NAME
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; expected {CONFIG_NAME} of an adapter in it")
    data = _json(path)
    if data.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type {str(data.get('peft_type'))[:80]!r}; expected 'LORA'")
    if _flag(path, "use_dora", data):
        raise CheckpointError(f"{path}: use_dora: DoRA is not read; expected plain LoRA")
    if data.get("bias", "none") != "none":
        raise CheckpointError(f"{path}: bias {str(data['bias'])[:80]!r}; expected 'none'")
    initial = data.get("init_lora_weights", True)
    if not any(initial is known or (isinstance(known, str) and initial == known) for known in _INITIAL):
        raise CheckpointError(
            f"{path}: init_lora_weights {str(initial)[:80]!r} changes the base; convert the adapter to plain LoRA "
            "(PEFT's save_pretrained does, with path_initial_model_for_weight_conversion)"
        )
    for key, value in data.items():  # kinds of LoRA that this list does not know are another function
        if key not in _OF_TRAINING | _READ and value not in (None, False, {}, []):
            raise CheckpointError(f"{path}: {key[:80]}: {str(value)[:80]}; expected plain LoRA, without it")
    return AdapterConfig(
        rank=_rank(path, "r", data.get("r", 8)),
        alpha=_number(path, "lora_alpha", data.get("lora_alpha", 8)),
        is_rank_stabilized=_flag(path, "use_rslora", data),
        targets=_names(path, "target_modules", data.get("target_modules")),
        saved=_names(path, "modules_to_save", data.get("modules_to_save") or []) or (),
        ranks={name: _rank(path, "rank_pattern", rank) for name, rank in _pattern(path, "rank_pattern", data)},
        alphas={name: _number(path, "alpha_pattern", alpha) for name, alpha in _pattern(path, "alpha_pattern", data)},
    )


def _json(path: Path) -> Mapping[str, Any]:
    try:
        data = parse_json(read_file(path, _MAX_BYTES, CheckpointError))
    except ValueError as failure:
        raise CheckpointError(f"{path}: cannot be read ({failure})") from failure
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def _flag(path: Path, key: str, data: Mapping[str, Any]) -> bool:
    value = data.get(key, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"{path}: {key}: expected true or false, got {value!r:.80}")
    return value


def _number(path: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise CheckpointError(f"{path}: {key}: expected a number above 0, got {str(value)[:80]}")
    return float(value)


def _rank(path: Path, key: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_RANK:
        raise CheckpointError(f"{path}: {key}: expected a whole number from 1 to {_MAX_RANK}, got {str(value)[:80]}")
    return value


def _names(path: Path, key: str, value: object) -> tuple[str, ...] | None:
    if isinstance(value, str) or value is None:
        return None  # an expression, or a word such as all-linear: the tensors say what it meant
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise CheckpointError(f"{path}: {key}: expected names of modules, got {str(value)[:80]}")
    return tuple(value)


def _pattern(path: Path, key: str, data: Mapping[str, Any]) -> list[tuple[str, object]]:
    pattern = data.get(key) or {}
    if not isinstance(pattern, dict):
        raise CheckpointError(f"{path}: {key}: expected numbers by name, got {str(pattern)[:80]}")
    for name in pattern:
        if not _LITERAL.fullmatch(name):
            raise CheckpointError(f"{path}: {key}: {name[:80]!r}: expected names of modules, no expression")
    return list(pattern.items())


def _of(pattern: Mapping[str, float], module: str, default: float) -> float:
    """PEFT matches ``(.*\\.)?(name)$`` and takes the first."""
    for name, value in pattern.items():
        if name.startswith("^"):
            if module == name[1:]:
                return value
        elif module == name or module.endswith(f".{name}"):
            return value
    return default
