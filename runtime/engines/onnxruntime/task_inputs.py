"""The inputs of an open engine that hold a task's tensors: values of ONNX Runtime, made once for each task.

A layer has five to fifteen such inputs, and each costs about a microsecond wherever it is given anew. So bindings are
kept: of a task as many as runs were under way at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import onnxruntime

from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.open_bundle import Bundle
from ....elastic import ElasticSpec
from ....errors import BundleCorruptError, InputError
from ...graphs.task_tensors import TaskTensors, base_tensors
from ...inputs.arrays import Array


class _Bound:
    """One task on one engine: its values, and bindings that hold them and wait for a run."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.idle: list[Any] = []


class TaskInputs:
    """``inputs`` are those of the session of ``engine`` that are none of a request's."""

    def __init__(self, bundle: Bundle, engine: EngineEntry, inputs: Sequence[Any]) -> None:
        """Raises BundleCorruptError for an input that is none of the manifest's, or has another shape or type."""
        manifest = bundle.manifest
        assert manifest.tasks is not None
        submodel = ElasticSpec(manifest.axes, ()).parse(engine.submodel)
        known = {tensor.name: tensor.shape_in(submodel) for tensor in manifest.tasks.tensors}
        for one in inputs:
            if one.type != "tensor(float)" or known.get(one.name) != tuple(one.shape):
                raise BundleCorruptError(
                    f"engine {engine.id}: input {one.name:.80} is {one.type} {one.shape}, the manifest says float32 "
                    f"{list(known.get(one.name, ()))} of a task"
                )
        self._base = base_tensors(bundle)
        self._shapes = {one.name: tuple(one.shape) for one in inputs}
        self._requested = {spec.name for spec in manifest.interface_of(engine)[0]}
        self._lock = Lock()
        self._bound: dict[TaskTensors | None, _Bound] = {}

    def arrays(self, task: TaskTensors | None = None) -> dict[str, Array]:
        """The tensors of ``task``, or of the base, as this engine takes them: the first steps of each axis."""
        tensors = self._base if task is None else task
        return {name: tensors.arrays[name][: shape[0]] for name, shape in self._shapes.items()}

    def values(self, task: TaskTensors | None) -> Mapping[str, Any]:
        """The same as values of ONNX Runtime, which read the arrays where they are."""
        return self._of(task).values

    def run(
        self, session: Any, names: Sequence[str], feeds: Mapping[str, Array], task: TaskTensors | None
    ) -> list[Array]:
        """Outputs of ``session`` under ``names``, owned by the caller. Raises InputError unless ``feeds`` has every
        input of a request, and no other: a binding remembers the address of the last one."""
        if feeds.keys() != self._requested:
            raise InputError(f"inputs {', '.join(sorted(feeds))}: expected {', '.join(sorted(self._requested))}")
        bound = self._of(task)
        try:
            binding = bound.idle.pop()
        except IndexError:
            binding = session.io_binding()
            for name, value in bound.values.items():
                binding.bind_ortvalue_input(name, value)
        kept = {name: np.ascontiguousarray(array) for name, array in feeds.items()}  # a binding has addresses alone
        for name, array in kept.items():
            binding.bind_cpu_input(name, array)
        for name in names:
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        outputs: list[Array] = binding.copy_outputs_to_cpu()
        binding.clear_binding_outputs()
        bound.idle.append(binding)
        return outputs

    def _of(self, task: TaskTensors | None) -> _Bound:
        bound = self._bound.get(task)
        if bound is None:
            with self._lock:
                if task not in self._bound:
                    arrays = self.arrays(task)
                    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
                    self._bound[task] = _Bound(values)
                return self._bound[task]
        return bound
