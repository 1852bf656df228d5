"""A model opened for many tasks: its own form of them, or low-rank pairs beside linear layers (no torch here)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..bucket import Bucket
from ..bundle.entries.task_entry import LORA_A, LORA_B, TasksEntry
from ..elastic import ElasticSpec, PrefixSlice, Submodel
from ..errors import CheckpointError
from ..workload import Op, linear
from .adapter_folder import Adapter, is_adapter, read_adapter
from .architecture import Architecture, Task, TaskSpec
from .source import ModelSource

if TYPE_CHECKING:  # plans are made without torch
    import torch


def with_tasks(
    source: ModelSource, given: Mapping[str, str | Path], lora_rank: int | None = None
) -> tuple[ModelSource, dict[str, Task]]:
    """``source`` whose engines take tasks, and the tasks in the ``given`` folders, by name: all of the model's own
    form, or all adapters of PEFT, for which engines have a pair of rank ``lora_rank`` at least beside each target.

    Raises CheckpointError for a model that takes none, and for a folder that is none of its tasks.
    """
    folders = {name: Path(folder) for name, folder in given.items()}
    adapters = [name for name, folder in folders.items() if is_adapter(folder)]
    if not adapters:
        if lora_rank is not None:
            raise CheckpointError("`lora_rank`: none of the tasks is an adapter of PEFT; leave it out")
        source = _in_own_form(source)
        assert source.tasks is not None
        return source, {name: source.tasks.read(folder) for name, folder in folders.items()}
    if others := folders.keys() - set(adapters):
        other = sorted(others)[0]
        raise CheckpointError(
            f"{folders[other]}: no adapter of PEFT, as {folders[adapters[0]]} is; tasks of one bundle are of one kind"
        )
    base = source.architecture
    read = {name: _in_parts(read_adapter(folder, _fused_shapes(base)), base) for name, folder in folders.items()}
    ranks = ranks_of(read.values(), lora_rank)
    source = with_low_rank(source, ranks, {parameter for adapter in read.values() for parameter in adapter.saved})
    return source, {name: task_of(adapter, ranks) for name, adapter in read.items()}


def _fused_shapes(base: Architecture) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters as the model's class has them: those that lie one behind the other in one are that."""
    shapes = dict(base.parameter_shapes)
    for fused, parts in base.stacked.items():
        rows = [shapes.pop(part) for part in parts]
        shapes[fused] = (sum(row[0] for row in rows), *rows[0][1:])
    return shapes


def _in_parts(adapter: Adapter, base: Architecture) -> Adapter:
    """``adapter`` with a pair for each part of a layer that ``base`` has in parts."""

    def rows(fused: str, whole: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        start = 0
        for part in base.stacked.get(fused, (fused,)):
            stop = start + base.parameter_shapes[part][0]
            yield part, whole[start:stop]
            start = stop

    pairs = {
        part.removesuffix(".weight"): (down, own)
        for module, (down, up) in adapter.pairs.items()
        for part, own in rows(f"{module}.weight", up)
    }
    saved = {part: own for name, whole in adapter.saved.items() for part, own in rows(name, whole)}
    return replace(adapter, pairs=pairs, saved=saved)


def with_stated_tasks(source: ModelSource, entry: TasksEntry) -> ModelSource:
    """``source`` whose engines take tasks as a bundle states it. Raises CheckpointError where it takes others."""
    if entry.kind == "lora":
        ranks, saved = stated_ranks(entry)
        shapes = source.architecture.parameter_shapes
        for name in (*(f"{module}.weight" for module in ranks), *saved):
            if name not in shapes:
                raise CheckpointError(
                    f"{source.checkpoint.folder}: has no {name:.120}, beside which the bundle's tasks have tensors; it "
                    "was made from another model"
                )
        return with_low_rank(source, ranks, saved)
    return _in_own_form(source)


def _in_own_form(source: ModelSource) -> ModelSource:
    form = source.architecture.tasks
    if form is None:
        raise CheckpointError(
            f"{source.checkpoint.folder}: family {source.family.name} has tasks as adapters of PEFT alone; expected "
            "folders with adapter_config.json"
        )
    return replace(source, tasks=form)


def ranks_of(adapters: Iterable[Adapter], least: int | None) -> dict[str, int]:
    """The rank of the engines' pair beside each target of ``adapters``: the largest, and ``least`` at least."""
    ranks: dict[str, int] = {}
    for adapter in adapters:
        for module, (down, _) in adapter.pairs.items():
            ranks[module] = max(ranks.get(module, least or 1), len(down))
    return dict(sorted(ranks.items()))


def stated_ranks(entry: TasksEntry) -> tuple[dict[str, int], frozenset[str]]:
    """The ranks that the engines of a bundle have, and the parameters that tasks may have whole."""
    pairs = {t.name.removesuffix(LORA_B): t.shape[1] for t in entry.tensors if t.name.endswith(LORA_B)}
    whole = (t.name.removesuffix(".T") for t in entry.tensors)
    return pairs, frozenset(name for name in whole if not name.endswith((LORA_A, LORA_B)))


def with_low_rank(source: ModelSource, ranks: Mapping[str, int], saved: Iterable[str]) -> ModelSource:
    """``source`` with a pair of the rank in ``ranks`` beside each linear layer named there; tasks may have parameters
    ``saved`` of their own too."""
    base, whole = source.architecture, frozenset(saved)
    pairs: dict[str, tuple[int, ...]] = {}
    for module, rank in ranks.items():
        outputs, inputs = base.parameter_shapes[f"{module}.weight"]
        pairs |= {module + LORA_A: (rank, inputs), module + LORA_B: (outputs, rank)}
    read = partial(_read, base.parameter_shapes, ranks, whole)
    form = TaskSpec("lora", frozenset({*pairs, *whole}), read, _merged, base.workload)
    architecture = replace(
        base,
        spec=_spec(base.spec, ranks),
        parameter_shapes={**base.parameter_shapes, **pairs},
        workload=partial(_workload, base, ranks),
        load=partial(_load, base, ranks, whole, str(source.checkpoint.folder)),
        tasks=form,
    )
    return replace(source, architecture=architecture, tasks=form)


def task_of(adapter: Adapter, ranks: Mapping[str, int]) -> Task:
    """``adapter`` with its pairs filled up with zeros to ``ranks``, which changes no product."""
    tensors: dict[str, np.ndarray] = dict(adapter.saved)
    for module, (down, up) in adapter.pairs.items():
        more = ranks[module] - len(down)
        tensors[module + LORA_A] = np.pad(down, ((0, more), (0, 0)))
        tensors[module + LORA_B] = np.pad(up, ((0, 0), (0, more)))
    own = {module: len(down) for module, (down, _) in adapter.pairs.items()}
    facts: dict[str, int | str] = {
        "rank": max(own.values()),
        "targets": ", ".join(sorted({_last(module) for module in own})),
    }
    filled = sorted({(rank, ranks[module]) for module, rank in own.items() if rank < ranks[module]})
    if filled:
        facts["filled with zeros"] = ", ".join(f"rank {rank} to {engines}" for rank, engines in filled)
    if adapter.saved:
        facts["whole"] = ", ".join(sorted({name.rpartition(".")[0] for name in adapter.saved}))
    return Task(adapter.folder, tensors, adapter.files, facts=facts)


def _read(shapes: Mapping[str, tuple[int, ...]], ranks: Mapping[str, int], saved: frozenset[str], folder: Path) -> Task:
    adapter = read_adapter(folder, shapes)
    for module, (down, _) in adapter.pairs.items():
        if module not in ranks:
            raise CheckpointError(
                f"{folder}: target {module}: the engines have no pair there; compile again with this task, or another "
                "with that target, among `tasks`"
            )
        if len(down) > ranks[module]:
            raise CheckpointError(
                f"{folder}: rank {len(down)} beside {module}: the engines have {ranks[module]}; compile again with "
                f"`lora_rank={len(down)}`"
            )
    if missing := adapter.saved.keys() - saved:
        raise CheckpointError(
            f"{folder}: {sorted(missing)[0]} was trained whole, and the engines have it frozen; compile again"
        )
    return task_of(adapter, ranks)


def _spec(spec: ElasticSpec, ranks: Mapping[str, int]) -> ElasticSpec:
    """Slices, and depths, of the pairs: those of the layer beside."""
    cuts = [cut for module in ranks for cut in _cuts(spec, module)]
    depths = {
        module + end: spec.min_depth[f"{module}.weight"]
        for module in ranks
        for end in (LORA_A, LORA_B)
        if f"{module}.weight" in spec.min_depth
    }
    return replace(spec, slices=(*spec.slices, *cuts), min_depth={**spec.min_depth, **depths})


def _cuts(spec: ElasticSpec, module: str) -> Iterator[PrefixSlice]:
    for cut in spec.slices_of(f"{module}.weight"):
        yield PrefixSlice(module + (LORA_B if cut.dim == 0 else LORA_A), cut.dim, cut.axis, cut.unit)


def _workload(base: Architecture, ranks: Mapping[str, int], submodel: Submodel, bucket: Bucket) -> list[Op]:
    ops = base.workload(submodel, bucket)
    for module, rank in ranks.items():
        name = f"{module}.weight"
        if base.spec.has(name, submodel):
            outputs, inputs = base.spec.shape_of(name, base.parameter_shapes[name], submodel)
            ops += [
                linear(f"{module}.lora_A", bucket.tokens, inputs, rank, bias=False),
                linear(f"{module}.lora_B", bucket.tokens, rank, outputs, bias=False),
            ]
    return ops


def _load(base: Architecture, ranks: Mapping[str, int], saved: frozenset[str], where: str) -> torch.nn.Module:
    import torch

    from .modules.layers import with_pairs

    module = base.load()
    assert isinstance(module.model, torch.nn.Module)
    _refuse_tied(module.model, saved, where)
    with_pairs(module.model, ranks, where)
    return module


def _refuse_tied(module: torch.nn.Module, saved: frozenset[str], where: str) -> None:
    """PEFT's copy of a tied parameter takes the place of one of its names, a task's tensor that of all."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        if len(tied) > 1 and (whole := sorted(saved.intersection(tied))):
            others = ", ".join(name for name in tied if name != whole[0])
            raise CheckpointError(
                f"{where}: {whole[0]} is tied to {others}, and an adapter has it whole, which unties it in PEFT; "
                "expected modules_to_save without it, or a base that ties nothing"
            )


def _merged(module: torch.nn.Module) -> torch.nn.Module:
    from .modules.layers import merged

    return merged(module)


def _last(module: str) -> str:
    return module.rpartition(".")[2]
