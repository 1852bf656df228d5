"""The tasks that a compile is asked for, read before any work (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...errors import PlanError
from ...exporters.architecture import Task
from ...exporters.source import ModelSource
from ...exporters.tasks import with_tasks
from ...profiles.device_profile import DeviceProfile


def asked_tasks(
    source: ModelSource,
    profile: DeviceProfile,
    tasks: Mapping[str, str | Path],
    lora_rank: int | None,
    mergeable: bool,
) -> tuple[ModelSource, dict[str, Task]]:
    """``source`` whose engines take ``tasks``, folders by name, and what those hold; itself without any.

    Raises PlanError for options without tasks, and for what engines with tasks cannot be, CheckpointError for a folder
    that is none of the model's tasks.
    """
    if lora_rank is not None and (not tasks or lora_rank < 1):
        raise PlanError(f"`lora_rank={lora_rank}`: expected at least 1, with tasks that are adapters of PEFT")
    if mergeable and not tasks:
        raise PlanError("mergeable: expected tasks, which are merged into the weights of such engines")
    if not tasks:
        return source, {}
    source, read = with_tasks(source, {name: Path(folder) for name, folder in tasks.items()}, lora_rank)
    if profile.backend != "onnxruntime":
        raise PlanError(
            f"task: engines with tasks are for onnxruntime, profile {profile.name} is for {profile.backend}"
        )
    if profile.precisions != ("fp32",):
        raise PlanError(f"task: engines with tasks are in fp32, asked for {', '.join(profile.precisions)}")
    if source.exits is not None:
        raise PlanError(f"task: {source.name} has exits, and segments take no tasks; compile it without `tasks`")
    return source, read
