"""A folder of Hugging Face's PEFT with a LoRA adapter: pairs of low-rank matrices by the model's own modules.

``y = x W^T + scale (x A^T) B^T`` with ``A`` [r, in] and ``B`` [out, r] (LoRA, arXiv 2106.09685, section 4.1).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from ..bundle.entries.task_entry import LORA_A, LORA_B
from ..errors import CheckpointError
from ..outside_file import read_json
from .checkpoints.checkpoint import Checkpoint, read_headers

CONFIG_NAME = "adapter_config.json"

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
        """Factor of the pair's product: ``alpha / r``, or rank-stabilized ``alpha / sqrt(r)``."""
        rank, alpha = self.rank_of(module), _of(self.alphas, module, self.alpha)
        return alpha / sqrt(rank) if self.is_rank_stabilized else alpha / rank


WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# What the names of a pair beside an embedding end in.
_OF_EMBEDDING = (".lora_embedding_A", ".lora_embedding_B")
_OF_BASE = ".base_layer."
_HEAD = "lm_head"
# Tables of tokens and positions, which are no linear layers though they have two dimensions.
_TABLE = re.compile(r"(?:.+\.)?(?:\w*embeddings?|embed_\w+|wte|wpe|shared)")
_MAX_SHOWN = 8


@dataclass(frozen=True, eq=False)
class Adapter:
    """``pairs`` are ``A`` [r, in] and scaled ``B`` [out, r] by module of the model, float32; ``saved`` are parameters
    that were trained whole, by name."""

    folder: Path
    config: AdapterConfig
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]
    saved: Mapping[str, np.ndarray]

    @property
    def files(self) -> tuple[Path, ...]:
        return self.folder / CONFIG_NAME, self.folder / WEIGHTS_NAME


def is_adapter(folder: Path) -> bool:
    """Whether ``folder`` is one of PEFT."""
    return (folder / CONFIG_NAME).is_file()


def read_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Adapter:
    """The adapter in ``folder``, of a model whose parameters have ``shapes`` by name.

    Raises CheckpointError for another kind of adapter, for targets that the model or the file does not have, for
    modules to save that the file lacks, for two tensors of one place, and for tensors of another shape.
    """
    config = read_adapter_config(folder)
    checkpoint = _opened(folder)
    linear = [
        name.removesuffix(".weight") for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2
    ]
    for target in config.targets or ():
        if not any(_ends(module, target) or _ends(target, module) for module in linear):
            raise CheckpointError(
                f"{folder / CONFIG_NAME}: target_modules: the model has no linear layer {target[:80]!r}"
                f"{_perhaps_tied(target)}; it has {_shown(linear)}"
            )
    pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    saved: dict[str, np.ndarray] = {}
    read: dict[str, str] = {}  # tensors of the file, by what of the model they are of
    for name in checkpoint.tensors:
        path = name.removeprefix(_PREFIX)
        if path.endswith(LORA_A):
            module = _module(folder, path.removesuffix(LORA_A), linear)
            _require_one(folder, read, module, name)
            pairs[module] = _pair(checkpoint, config, name, shapes[f"{module}.weight"])
        elif not path.endswith(LORA_B):
            parameter = _saved(folder, path, config, shapes)
            _require_one(folder, read, parameter, name)
            saved[parameter] = _array(checkpoint, name, shapes[parameter])
        elif name.removesuffix(LORA_B) + LORA_A not in checkpoint.tensors:
            raise CheckpointError(f"{folder / WEIGHTS_NAME}: tensor {name[:120]} has no {LORA_A[1:]} beside it")
    if not pairs:
        raise CheckpointError(f"{folder / WEIGHTS_NAME}: no tensor ends in {LORA_A}; expected those of a LoRA adapter")
    _require_whole(folder, config, checkpoint.tensors, shapes, saved)
    return Adapter(folder, config, pairs, saved)


def _opened(folder: Path) -> Checkpoint:
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        pickled = folder / "adapter_model.bin"
        why = f"{pickled.name} is pickled, which can run code; " if pickled.exists() else ""
        raise CheckpointError(f"{path}: no such file; {why}save the adapter with PEFT's save_pretrained")
    return Checkpoint(folder, {}, read_headers(path, path.name))


def _module(folder: Path, path: str, linear: Collection[str]) -> str:
    """The linear layer that the adapter calls ``path``; a folder may have a prefix such as ``bert.``, or lack it."""
    found = [module for module in linear if _ends(path, module) or _ends(module, path)]
    exact = [module for module in found if module == path]
    if len(exact or found) != 1:
        which = "several" if found else "no"
        raise CheckpointError(
            f"{folder / WEIGHTS_NAME}: target {path[:120]}: the model has {which} linear layer of that name; it has "
            f"{_shown(found or linear)}"
        )
    return (exact or found)[0]


def _require_one(folder: Path, read: dict[str, str], place: str, name: str) -> None:
    """Notes that the tensor ``name`` is of ``place``, a module or parameter. Raises CheckpointError for a second."""
    if place in read:
        first, second = sorted((read[place], name))
        raise CheckpointError(
            f"{folder / WEIGHTS_NAME}: tensors {first[:120]} and {second[:120]} are both of {place}; expected one"
        )
    read[place] = name


def _pair(
    checkpoint: Checkpoint, config: AdapterConfig, name: str, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    path = name.removeprefix(_PREFIX).removesuffix(LORA_A)
    outputs, inputs, rank = *shape, config.rank_of(path)
    other = name.removesuffix(LORA_A) + LORA_B
    if other not in checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.folder / WEIGHTS_NAME}: tensor {other[:120]} is missing")
    down, up = _array(checkpoint, name, (rank, inputs)), _array(checkpoint, other, (outputs, rank))
    return down, (up.astype(np.float64) * config.scale_of(path)).astype(np.float32)


def _saved(folder: Path, path: str, config: AdapterConfig, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The parameter of a module that was trained whole."""
    where = f"{folder / WEIGHTS_NAME}: tensor {path[:120]}"
    if path.endswith(_OF_EMBEDDING):
        raise CheckpointError(f"{where} is LoRA of an embedding; expected pairs beside linear layers alone")
    if _OF_BASE in path:
        raise CheckpointError(
            f"{where} is a base weight in the adapter; save it with PEFT's save_pretrained(save_embedding_layers=False)"
        )
    found = [name for name in shapes if name == path] or [name for name in shapes if _ends(path, name)]
    if len(found) != 1 or not _is_saved(path, config):
        raise CheckpointError(
            f"{where} is no pair of LoRA, nor of a module that modules_to_save names and the model has"
            f"{_perhaps_tied(path.removesuffix('.weight'))}"
        )
    return found[0]


def _require_whole(
    folder: Path,
    config: AdapterConfig,
    tensors: Collection[str],
    shapes: Collection[str],
    saved: Collection[str],
) -> None:
    """Raises CheckpointError where the file lacks what the configuration says that it has."""
    paths = [name.removeprefix(_PREFIX).removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
    for target in config.targets or ():
        if not any(_ends(path, target) for path in paths):
            raise CheckpointError(
                f"{folder / WEIGHTS_NAME}: no pair beside {target[:80]!r}, which {CONFIG_NAME} names in target_modules"
            )
    for name in shapes:
        if name not in saved and _is_saved(name, config):
            raise CheckpointError(
                f"{folder / WEIGHTS_NAME}: no tensor {name}, of a module that {CONFIG_NAME} names in modules_to_save"
            )


def _is_saved(parameter: str, config: AdapterConfig) -> bool:
    """Whether ``parameter`` is in a module that was trained whole: PEFT compares ends of names, within a name too."""
    names = parameter.split(".")[:-1]
    modules = [".".join(names[:count]) for count in range(1, len(names) + 1)]
    return any(module.endswith(config.saved) for module in modules)


def _perhaps_tied(module: str) -> str:
    """Possible reason why the model has no ``module`` of its own."""
    return " of its own (one that it ties to its table of tokens is none)" if _ends(module, _HEAD) else ""


def _array(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    from .checkpoints.own_folder import stored_tensor  # it needs torch

    header = checkpoint.tensors[name]
    if header.shape != shape:
        raise CheckpointError(
            f"{checkpoint.folder / WEIGHTS_NAME}: tensor {name[:120]} has shape {list(header.shape)}, expected "
            f"{list(shape)} as {CONFIG_NAME} and the model say"
        )
    array: np.ndarray = stored_tensor(checkpoint, name).numpy()
    return array


def _ends(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _shown(names: Collection[str]) -> str:
    """``names`` of linear layers, without embeddings, or the last parts of many."""
    names = [name for name in names if not _TABLE.fullmatch(name)]
    kinds = sorted({name.rpartition(".")[2] for name in names}) if len(names) > _MAX_SHOWN else sorted(names)
    return ", ".join(kinds[:_MAX_SHOWN]) + (", ..." if len(kinds) > _MAX_SHOWN else "")


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The configuration in ``folder``. Raises CheckpointError for anything but plain LoRA."""
    path = folder / CONFIG_NAME
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; expected {CONFIG_NAME} of an adapter in it")
    data = read_json(path, CheckpointError)
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
