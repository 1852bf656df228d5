"""A task of conditional adapters as a folder: ``config.json`` and ``model.safetensors`` with the tensors of the task.

A task is adapters, routers, norms, the schedule of the soft top-k, the reductions, and the classifier if there is one
(section 7 of Conditional Adapters, arXiv 2304.04947). The frozen weights are not in it; their hash is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ....errors import CheckpointError
from ...architecture import Task, hash_of
from ...checkpoints.checkpoint import compare_with_headers, open_checkpoint
from ...checkpoints.own_folder import OwnConfig, read_config, read_tensors, save_tensors
from .config import ENCODER, REDUCTION, CodaConfig, CodaEncoderDecoderConfig, SoftTopK
from .encoder_decoder import load_model as load_pair
from .model import load_model
from .ops import is_of_task, parameters, temperature_names

# Fields that a task may have another value of than its base; all else of the configuration is the graph's.
_OWN_FIELDS = ("reduction", "reductions", "soft_top_k")
_OWN_EPSILONS = ("epsilon", "epsilon_start", "epsilon_decay")
_TASK_TYPE = "coda_task"


@dataclass(frozen=True, kw_only=True)
class CodaTaskConfig(OwnConfig):
    """``config.json`` of a task: the hash of its base's frozen weights, and what the task has its own of."""

    base_sha256: str
    reduction: int
    reductions: tuple[int, ...] | None = None
    soft_top_k: SoftTopK | None = None
    model_type: Literal["coda_task"] = "coda_task"

    def problem(self) -> str | None:
        return None  # judged as a part of the base's configuration


def save_task(trained: Path, base: Path, folder: Path) -> Path:
    """Writes what the checkpoint ``trained`` has beyond ``base`` into ``folder``, which must not exist; returns it.

    Both are encoders, or both encoders with T5's decoder, which is frozen with the rest. Raises CheckpointError unless
    they have the same structure, and bit for bit the same frozen tensors.
    """
    if open_checkpoint(trained).config.get("model_type") == CodaEncoderDecoderConfig.model_type:
        pair, frozen_pair = load_pair(trained), load_pair(base)
        _require_alike(trained, pair.config, frozen_pair.config, ("encoder",))
        configs, prefix = (pair.config.encoder, frozen_pair.config.encoder), ENCODER
        weights = [dict(one.named_parameters()) for one in (pair, frozen_pair)]
    else:
        model, frozen = load_model(trained), load_model(base)
        configs, prefix = (model.config, frozen.config), ""
        weights = [dict(one.named_parameters()) for one in (model, frozen)]
    _require_structure(trained, *configs)
    tensors = {name: value for name, value in weights[0].items() if _is_of(prefix, name)}
    frozen_tensors = {name: value.numpy() for name, value in weights[1].items() if name not in tensors}
    for name, value in frozen_tensors.items():
        if weights[0][name].numpy().tobytes() != value.tobytes():
            raise CheckpointError(f"{trained}: tensor {name} differs from that of {base}, where tasks share it frozen")
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; choose another folder")
    own = {name: getattr(configs[0], name) for name in _OWN_FIELDS}
    return save_tensors(tensors, CodaTaskConfig(base_sha256=hash_of(frozen_tensors), **own), folder)


def read_task(config: CodaConfig, folder: Path, prefix: str = "") -> Task:
    """The task in ``folder``, of the model whose encoder ``config`` describes; its tensors follow ``prefix``.

    Raises CheckpointError for another folder, for tensors that the model does not have in this shape, and for a
    schedule or reductions that engines of the model cannot have.
    """
    checkpoint = open_checkpoint(folder)
    where = folder / "config.json"
    if checkpoint.config.get("model_type") != _TASK_TYPE:
        raise CheckpointError(
            f"{where}: model_type {str(checkpoint.config.get('model_type'))[:80]!r}, expected {_TASK_TYPE!r}: the task "
            "alone, which save_task takes out of a whole checkpoint"
        )
    stated = read_config(checkpoint, CodaTaskConfig)
    ours = replace(config, **{name: getattr(stated, name) for name in _OWN_FIELDS})
    # Other reductions of the base are no fault of a task that is not offered at them.
    if problem := replace(ours, reduction_of_one="routed", tokens_selected=None).problem():
        raise CheckpointError(f"{where}: {problem}")
    _require_structure(where, ours, config)
    shapes = {f"{prefix}{name}": shape for name, shape in parameters(config).shapes.items() if is_of_task(name)}
    compare_with_headers(checkpoint, shapes)
    tensors = {name: tensor.numpy() for name, tensor in read_tensors(checkpoint, shapes).items()}
    facts: dict[str, int | str] = {"reduction": stated.reduction}
    if ours.soft_top_k is not None:
        facts["epsilon"] = f"{ours.soft_top_k.epsilon:g}"
        temperatures = np.array(ours.soft_top_k.all_temperatures, np.float32)
        tensors |= dict.fromkeys((f"{prefix}{name}" for name in temperature_names(config)), temperatures)
    choices = {REDUCTION: _reductions(where, ours, config)} if len(config.offered) > 1 else {}
    return Task(folder, tensors, tuple(checkpoint.source_files()), stated.base_sha256, choices, facts)


def _is_of(prefix: str, name: str) -> bool:
    return name.startswith(prefix) and is_of_task(name.removeprefix(prefix))


def _require_structure(where: Path, ours: CodaConfig, base: CodaConfig) -> None:
    """Raises CheckpointError where the two are no tasks on one graph."""
    _require_alike(where, ours, base, _OWN_FIELDS)
    if ours.soft_top_k is None or base.soft_top_k is None:
        if ours.soft_top_k is not base.soft_top_k:
            raise _another_graph(where, "soft_top_k", ours.soft_top_k, base.soft_top_k)
    else:
        _require_alike(where, ours.soft_top_k, base.soft_top_k, _OWN_EPSILONS, "soft_top_k: ")


def _require_alike(where: Path, ours: Any, base: Any, own: Sequence[str], at: str = "") -> None:
    """Raises CheckpointError unless the two dataclasses agree in all but their ``own`` fields."""
    for name in (field.name for field in fields(base) if field.name not in own):
        if getattr(ours, name) != getattr(base, name):
            raise _another_graph(where, f"{at}{name}", getattr(ours, name), getattr(base, name))


def _another_graph(where: Path, name: str, ours: object, base: object) -> CheckpointError:
    """The refusal of a task that has another ``name`` than its base."""
    return CheckpointError(f"{where}: {name}: {ours!s:.80}, the base has {base!s:.80}; all tasks share its graph")


def _reductions(where: Path, ours: CodaConfig, base: CodaConfig) -> tuple[int, ...]:
    """The reductions that the task may be answered at: those it states, else its own and the base's above it."""
    reductions = ours.reductions or (*(r for r in base.offered if r > ours.reduction), ours.reduction)
    for reduction in reductions:
        if reduction not in base.offered:
            raise CheckpointError(
                f"{where}: reduction {reduction}: the base is offered at {', '.join(map(str, base.offered))}; state "
                "reductions that are among those"
            )
    return reductions
