"""What a manifest says of tasks, beyond types."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod

from .entries.engine_entry import EngineEntry
from .entries.tensor_spec import MAX_ELEMENTS
from .manifest import Manifest

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_RANK = 8


def _place(engine: EngineEntry) -> str:
    """Whose place the engine has: what stands at it takes the same inputs."""
    return f"{engine.submodel} {engine.segment or ''} {engine.bucket.label} {engine.backend} {engine.capacity or ''}"


def task_problems(manifest: Manifest) -> Iterable[str]:
    """Tensors that no engine takes, or that do not lie on the axes."""
    tasks = manifest.tasks
    if tasks is None:
        return
    if not _SHA256.fullmatch(tasks.base_sha256):
        yield f"tasks: base_sha256 {tasks.base_sha256[:80]!r}; expected 64 lower-case hexadecimal digits"
    if not tasks.tensors:
        yield "tasks: expected at least one tensor"
    if manifest.exits is not None or any(engine.backend != "onnxruntime" for engine in manifest.every_engine):
        yield "tasks: expected engines for onnxruntime, of a model without exits"
    if tasks.merged and sorted(map(_place, tasks.merged)) != sorted(map(_place, manifest.every_engine)):
        yield "tasks: merged; expected one for every engine that takes tasks, and no other"
    axes = {axis.name: axis for axis in manifest.axes}
    taken = {spec.name for specs in (manifest.inputs, manifest.outputs) for spec in specs}
    for tensor in tasks.tensors:
        shape = list(tensor.shape)[:_MAX_RANK]
        if tensor.name in taken:
            yield f"tasks: tensor {tensor.name[:80]!r} stands twice, or is an input or output"
        taken.add(tensor.name)
        if not 1 <= len(tensor.shape) <= _MAX_RANK or any(size < 1 for size in tensor.shape):
            yield f"tasks: tensor {tensor.name[:80]}: shape {shape}; expected 1 to {_MAX_RANK} positive numbers"
        elif prod(tensor.shape) > MAX_ELEMENTS:
            yield f"tasks: tensor {tensor.name[:80]} has more than {MAX_ELEMENTS} elements"
        if tensor.axis is not None:
            axis = axes.get(tensor.axis)
            if axis is None or axis.choices is not None or [axis.size * tensor.unit] != shape[:1]:
                yield (
                    f"tasks: tensor {tensor.name[:80]}: shape {shape} does not begin with {tensor.unit} for each step "
                    f"of an axis {tensor.axis[:80]!r}"
                )
