"""A job: one more task for a bundle, proven against PyTorch before the bundle lists it."""

from __future__ import annotations

from pathlib import Path

import torch

from ..argument_types import checked
from ..bundle.open_bundle import Bundle, open_bundle
from ..errors import BundleIncompatibleError, CheckpointError
from ..exporters.ranking import permute_axis
from ..exporters.universal import UniversalModel, load_universal
from ..whole_file import require_writable
from .tasks.add_tasks import add_tasks, orders_of, require_names
from .tasks.task_layout import frozen_sha256
from .verify import cases_of, require_same_interface, source_of
from .work.clock import Clock, Progress, silent


@checked
def add_task(
    bundle: str | Path, name: str, folder: str | Path, against: str | Path, progress: Progress = silent
) -> Path:
    """Adds the task in ``folder`` to ``bundle`` under ``name``, and returns the bundle's path; ``against`` is the model
    folder of the bundle's base, for PyTorch's side of the gate.

    What the bundle has stays untouched: its manifest, engines and tasks. Where anything is refused nothing is added.
    Raises BundleError, CheckpointError for another base or a folder that is none of its tasks, InputError for a name
    that is taken, ParityError where an engine with the task's tensors does not equal PyTorch, OutputError.
    """
    clock, opened = Clock(progress), open_bundle(bundle)
    if opened.manifest.tasks is None:
        raise BundleIncompatibleError(
            f"bundle {bundle}: its engines take no tasks; compile it with `tasks`, which makes engines that do"
        )
    require_names(opened, [name])
    require_writable(opened.path, f"task {name}")
    with clock("model"):
        source = source_of(against, opened)
        assert source.tasks is not None
        task = source.tasks.read(Path(folder))
        universal = load_universal(source)
        require_same_interface(universal, opened)
        _require_base(universal, opened)
        for axis, places in orders_of(opened).items():
            permute_axis(universal, axis, torch.from_numpy(places).long())
    with clock("parity"):
        add_tasks(opened, universal, cases_of(opened, universal), {name: task}, clock)
    return opened.path


def _require_base(universal: UniversalModel, bundle: Bundle) -> None:
    stated, found = bundle.manifest.tasks, frozen_sha256(universal)
    if stated is not None and found != stated.base_sha256:
        raise CheckpointError(
            f"{universal.source.checkpoint.folder}: its frozen weights have the hash {found[:16]}..., those of "
            f"{bundle.path} {stated.base_sha256[:16]}...; the bundle was made from another model"
        )
