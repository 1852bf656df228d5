"""A folder of Hugging Face's PEFT with a LoRA adapter: pairs of low-rank matrices by the model's own modules.

``y = x W^T + scale (x A^T) B^T`` with ``A`` [r, in] and ``B`` [out, r] (LoRA, arXiv 2106.09685, section 4.1).
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..bundle.entries.task_entry import LORA_A, LORA_B
from ..errors import CheckpointError
from ..outside_file import read_json
from ..strict import structure
from .checkpoints.checkpoint import Checkpoint, open_weights
from .checkpoints.config import known_keys

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_MAX_RANK = 2**16
# Keys with any value: how training went, the file's author, and what the tensors say as well.
_OF_TRAINING = frozenset(
    [
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("lora_dropout", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core", "loftq_config"),
        *("eva_config", "qalora_group_size", "ensure_weight_tying", "runtime_config", "fan_in_fan_out"),
    ]
)
# The others begin from another base than the one that they name.
_INITIAL = (True, False, "gaussian", "orthogonal", "eva")
# Names in a pattern, in which PEFT escapes nothing. Other regular expressions are not run.
_LITERAL = re.compile(r"\^?[\w.-]+")
_PREFIX = "base_model.model."
# Ends of names of a pair beside an embedding.
_OF_EMBEDDING = (".lora_embedding_A", ".lora_embedding_B")
_OF_BASE = ".base_layer."
_HEAD = "lm_head"
# Tables of tokens and positions, which are no linear layers though they have two dimensions.
_TABLE = re.compile(r"(?:.+\.)?(?:\w*embeddings?|embed_\w+|wte|wpe|shared)")
_MAX_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The keys that are read, with PEFT's defaults. ``modules_to_save`` were trained whole; numbers in patterns are
    those of modules by their names, or ends of them."""

    peft_type: Literal["LORA"]
    r: int = field(default=8, metadata={"min": 1, "max": _MAX_RANK})
    lora_alpha: float = field(default=8.0, metadata={"min": 1e-9, "max": 1e9})
    use_rslora: bool = False
    bias: Literal["none"] = "none"
    init_lora_weights: Any = True
    target_modules: str | tuple[str, ...] | None = None
    modules_to_save: tuple[str, ...] | None = None
    rank_pattern: Mapping[str, int] | None = field(default=None, metadata={"min": 1, "max": _MAX_RANK})
    alpha_pattern: Mapping[str, float] | None = field(default=None, metadata={"min": 1e-9, "max": 1e9})

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of modules; none where there is an expression, or a word such as all-linear: the tensors say what it
        meant."""
        return self.target_modules if isinstance(self.target_modules, tuple) else ()

    def rank_of(self, module: str) -> int:
        """The rank of the pair beside ``module``."""
        return int(_of(self.rank_pattern, module, self.r))

    def scale_of(self, module: str) -> float:
        """Factor of the pair's product: ``alpha / r``, or rank-stabilized ``alpha / sqrt(r)``."""
        rank, alpha = self.rank_of(module), _of(self.alpha_pattern, module, self.lora_alpha)
        return alpha / sqrt(rank) if self.use_rslora else alpha / rank

    def has_whole(self, parameter: str) -> bool:
        """Whether ``parameter`` is in a module that was trained whole: PEFT compares ends of names, within a name
        too."""
        names = parameter.split(".")[:-1]
        modules = [".".join(names[:count]) for count in range(1, len(names) + 1)]
        return any(module.endswith(self.modules_to_save or ()) for module in modules)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The configuration in ``folder``. Raises CheckpointError for anything but plain LoRA."""
    path = folder / CONFIG_NAME
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; expected {CONFIG_NAME} of an adapter in it")
    data = read_json(path, CheckpointError)
    known = known_keys(AdapterConfig, data)
    config = structure(AdapterConfig, known, str(path), CheckpointError)
    if config.init_lora_weights not in _INITIAL:
        raise CheckpointError(
            f"{path}: init_lora_weights {str(config.init_lora_weights)[:80]!r} changes the base; convert the adapter "
            "to plain LoRA (PEFT's save_pretrained does, with path_initial_model_for_weight_conversion)"
        )
    for key, value in data.items():  # kinds of LoRA that this list does not know are another function
        if key not in _OF_TRAINING | known.keys() and value not in (None, False, {}, []):
            raise CheckpointError(f"{path}: {key[:80]}: {str(value)[:80]}; expected plain LoRA, without it")
    for key, pattern in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        for name in pattern or ():
            if not _LITERAL.fullmatch(name):
                raise CheckpointError(f"{path}: {key}: {name[:80]!r}: expected names of modules, no expression")
    return config


def _of(pattern: Mapping[str, float] | None, module: str, default: float) -> float:
    """PEFT matches ``(.*\\.)?(name)$`` and takes the first."""
    for name, value in (pattern or {}).items():
        if module == name[1:] if name.startswith("^") else _ends(module, name):
            return value
    return default


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
    remedy = "save the adapter with PEFT's save_pretrained"
    checkpoint = open_weights(folder / WEIGHTS_NAME, "adapter_model.bin", remedy)
    linear = [
        name.removesuffix(".weight") for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2
    ]
    for target in config.targets:
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
            (saved[parameter],) = _arrays(checkpoint, {name: shapes[parameter]})
        elif name.removesuffix(LORA_B) + LORA_A not in checkpoint.tensors:
            raise CheckpointError(f"{folder / WEIGHTS_NAME}: tensor {name[:120]} has no {LORA_A[1:]} beside it")
    if not pairs:
        raise CheckpointError(f"{folder / WEIGHTS_NAME}: no tensor ends in {LORA_A}; expected those of a LoRA adapter")
    _require_whole(folder, config, checkpoint.tensors, shapes, saved)
    return Adapter(folder, config, pairs, saved)


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
    down, up = _arrays(checkpoint, {name: (rank, inputs), other: (outputs, rank)})
    return down, (up.astype(np.float64) * config.scale_of(path)).astype(np.float32)


def _arrays(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> list[np.ndarray]:
    from .checkpoints.own_folder import read_tensors  # it needs torch

    return [tensor.numpy() for tensor in read_tensors(checkpoint, shapes, f"{CONFIG_NAME} and the model say").values()]


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
    if len(found) != 1 or not config.has_whole(path):
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
    for target in config.targets:
        if not any(_ends(path, target) for path in paths):
            raise CheckpointError(
                f"{folder / WEIGHTS_NAME}: no pair beside {target[:80]!r}, which {CONFIG_NAME} names in target_modules"
            )
    for name in shapes:
        if name not in saved and config.has_whole(name):
            raise CheckpointError(
                f"{folder / WEIGHTS_NAME}: no tensor {name}, of a module that {CONFIG_NAME} names in modules_to_save"
            )


def _perhaps_tied(module: str) -> str:
    """Possible reason why the model has no ``module`` of its own."""
    return " of its own (one that it ties to its table of tokens is none)" if _ends(module, _HEAD) else ""


def _ends(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _shown(names: Collection[str]) -> str:
    """``names`` of linear layers, without embeddings, or the last parts of many."""
    names = [name for name in names if not _TABLE.fullmatch(name)]
    kinds = sorted({name.rpartition(".")[2] for name in names}) if len(names) > _MAX_SHOWN else sorted(names)
    return ", ".join(kinds[:_MAX_SHOWN]) + (", ..." if len(kinds) > _MAX_SHOWN else "")
