"""A task of conditional adapters as a folder: ``config.json`` and ``model.safetensors`` with the tensors of the task.

A task is adapters, routers, norms, the schedule of the soft top-k, the reductions, and the classifier if there is one
(section 7 of Conditional Adapters, arXiv 2304.04947). The frozen weights are not in it; their hash is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ....errors import CheckpointError
from ...checkpoints.checkpoint import open_checkpoint
from ...checkpoints.own_config import OwnConfig, read_config
from ...checkpoints.own_folder import read_tensors, save_tensors
from ...checkpoints.stored_tensors import compare_with_headers
from ...tasks.task_form import Task, hash_of
from .architecture.config import REDUCTION, CodaConfig, SoftTopK
from .architecture.shapes import is_of_task, parameter_shapes, temperature_names
from .folder import load_model

# What a task may have another value of than its base; all else of the configuration is the graph's.
_OWN_FIELDS = ("reduction", "reductions", "soft_top_k")
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

    Raises CheckpointError unless both have the same structure, and bit for bit the same frozen tensors.
    """
    model, frozen = load_model(trained), load_model(base)
    require_structure(trained, model.config, frozen.config)
    return save_difference((trained, model), (base, frozen), model.config, folder)


def save_difference(
    trained: tuple[Path, torch.nn.Module],
    base: tuple[Path, torch.nn.Module],
    config: CodaConfig,
    folder: Path,
    prefix: str = "",
) -> Path:
    """Writes the task that one checkpoint and its module have beyond those of ``base``; ``config`` is that of the
    trained encoder, whose tensors follow ``prefix``. Raises as ``save_task``."""
    theirs, tensors = dict(base[1].named_parameters()), {}
    for name, parameter in trained[1].named_parameters():
        if _is_of(prefix, name):
            tensors[name] = parameter
        elif parameter.numpy().tobytes() != theirs[name].numpy().tobytes():
            raise CheckpointError(
                f"{trained[0]}: tensor {name} differs from that of {base[0]}, where tasks share it frozen"
            )
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; choose another folder")
    digest = hash_of({name: value.numpy() for name, value in theirs.items() if not _is_of(prefix, name)})
    own = {name: getattr(config, name) for name in _OWN_FIELDS}
    return save_tensors(tensors, CodaTaskConfig(base_sha256=digest, **own), folder)


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
    # What the base states of other reductions is no fault of a task that is not offered at them.
    if problem := replace(ours, reduction_of_one="routed", tokens_selected=None).problem():
        raise CheckpointError(f"{where}: {problem}")
    require_structure(where, ours, config)
    shapes = {f"{prefix}{name}": shape for name, shape in parameter_shapes(config).items() if is_of_task(name)}
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


def require_structure(where: Path, ours: CodaConfig, base: CodaConfig) -> None:
    """Raises CheckpointError where the two are no tasks on one graph."""
    for field in fields(CodaConfig):
        if field.name not in _OWN_FIELDS and getattr(ours, field.name) != getattr(base, field.name):
            raise another_graph(where, field.name, getattr(ours, field.name), getattr(base, field.name))
    if (ours.soft_top_k is None) != (base.soft_top_k is None):
        raise another_graph(where, "soft_top_k", ours.soft_top_k, base.soft_top_k)
    if ours.soft_top_k is not None and base.soft_top_k is not None:
        for name in ("rounds", "initial"):
            if getattr(ours.soft_top_k, name) != getattr(base.soft_top_k, name):
                raise another_graph(
                    where, f"soft_top_k: {name}", getattr(ours.soft_top_k, name), getattr(base.soft_top_k, name)
                )


def another_graph(where: Path, name: str, ours: object, base: object) -> CheckpointError:
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
