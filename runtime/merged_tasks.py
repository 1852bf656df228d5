"""Tasks that a model is opened with in its weights: engines of their own, which no other task shares, and no inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ..bundle.device_files.task_index import read_tasks
from ..bundle.entries.task_entry import MergedTask
from ..bundle.open_bundle import Bundle
from ..errors import BundleIncompatibleError, InputError, SelectionError
from ..strict import nearest
from .engines.memory import engine_needs
from .engines.residency import Residency
from .graphs.task_tensors import read_task_tensors


def merged_bundles(bundle: Bundle, names: Sequence[str]) -> dict[str, Bundle]:
    """By name the bundle as the engines of that task alone, with its tensors in their weights.

    Raises InputError for what is no list of names, SelectionError for a name that the bundle does not have,
    BundleIncompatibleError where it has no engines to merge into, BundleCorruptError for tensors that are not its own.
    """
    is_list = isinstance(names, Collection) and not isinstance(names, str)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise InputError(f"merge: expected a list of tasks by name, got {names!r:.80}")
    if not names:
        return {}
    stated = bundle.manifest.tasks
    known = {task.name: task for task in read_tasks(bundle)}
    for name in names:
        if name not in known:
            raise SelectionError(f"merge: no task {name!r:.80} in bundle {bundle.path}{nearest(name[:80], known)}")
    if stated is None or not stated.merged:
        raise BundleIncompatibleError(
            f"merge: bundle {bundle.path} has no engines that a task can be merged into; compile it with "
            "`mergeable=True`"
        )
    found = {}
    for name in names:
        tensors = read_task_tensors(bundle, known[name])
        found[name] = bundle.with_merged(MergedTask(name, stated.kind, tensors.arrays))
    return found


def packed(bundle: Bundle) -> dict[str, Residency]:
    """The residency of whole engines that a task is merged into: they own their weights whatever is asked for."""
    return {engine.id: "packed" for engine in bundle.manifest.engines}


def merged_bytes(merged: Iterable[Bundle]) -> int:
    """What the whole engines of all of ``merged`` hold once they are open."""
    return sum(need.weight_bytes + need.own_bytes for one in merged for need in engine_needs(one, one.manifest.engines))


def require_no_cap(merged: Mapping[str, Bundle], bundle: Bundle, memory_mb: float | None) -> None:
    """Raises InputError for a cap beside merged tasks that generate, whose engines and caches it does not count."""
    if merged and memory_mb is not None and bundle.manifest.generation is not None:
        raise InputError(
            "memory_mb: a cap does not count engines and caches of merged tasks that generate; load without it, or "
            "without merge"
        )
