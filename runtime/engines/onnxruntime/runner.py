"""Engines on ONNX Runtime's CPU provider, in three residencies.

``shared``: weights stay mapped from the bundle's store and are read in place; opens in milliseconds, owns no weights.
``packed``: weights are copied into ONNX Runtime's own layout; fastest, owns them all.
``mapped``: the packed layout is mapped from a host-local cache (mapped_cache.py); as fast, owns no weights.

The inputs that hold a task's tensors are values of ONNX Runtime, made once for each task. A layer has five to fifteen,
and each costs about a microsecond wherever it is given anew. So bindings are kept: of a task as many as runs were under
way at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import onnxruntime

from ....bucket import Bucket
from ....bundle.entries.engine_entry import Decode, EngineEntry, Residency
from ....bundle.open_bundle import Bundle
from ....elastic import ElasticSpec
from ....errors import BundleCorruptError, BundleError, BundleIncompatibleError, InputError
from ....outside import is_of_library, library_errors, said_by
from ....profiles.precision import FOUR_BITS, HALF_ENCODINGS, PRECISIONS
from ...device.layout import layout_of, routes_of
from ...graphs.initializers import files_of
from ...graphs.task_tensors import TaskTensors, base_tensors, merged_weights
from ...graphs.weight_store import MappedStore, mapped_store, store_initializers
from ...inputs.arrays import Array, named_sizes, nearest_shape, random_feeds
from .mapped_cache import mapped_engine
from .session import (
    OPTIMIZATION_LEVEL,
    SAVED_OPTIMIZATION_LEVEL,
    SPIN_US,
    STEP_SPIN_US,
    open_session,
    require_tensors,
    session_options,
)


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


# Shape at which an engine that was packed into a file is tried, or the nearest that it takes.
_TRIED_SHAPE = Bucket(1, 16)


class OnnxRuntimeRunner:
    """One engine as one session; see ``Runner``."""

    def __init__(
        self,
        bundle: Bundle,
        engine: EngineEntry,
        residency: Residency,
        threads: int,
        affinity: Sequence[int] = (),
    ) -> None:
        self.engine = engine
        self.residency: Residency = residency
        self._bundle = bundle
        self._threads = threads
        self._affinity = affinity
        self._inputs, self._outputs = bundle.manifest.interface_of(engine)
        self._output_names = [spec.name for spec in self._outputs]
        self._all_names = [*self._output_names, *(entry.name for entry in engine.routing or ())]
        self._session: Any = None
        self._stores: tuple[MappedStore, ...] = ()  # even packed, what has no packed layout is mapped
        self._tasks: TaskInputs | None = None

    def __enter__(self) -> OnnxRuntimeRunner:
        """Opens the session. Raises BundleCorruptError or BundleIncompatibleError."""
        bundle, file = self._bundle, self.engine.file
        with bundle.held(file, *bundle.manifest.weight_names):
            path = bundle.file(file)
            initializers = store_initializers(bundle, self.engine)
            if self.residency == "mapped":  # from a file of this user alone
                session = self._mapped_session(path)
            else:
                options = self._options(OPTIMIZATION_LEVEL, packed=self.residency == "packed")
                session = open_session(path, options, merged_weights(bundle, initializers))
                read = files_of(initializers)
                self._stores = tuple(mapped_store(bundle.file(each), bundle.sha256(each)) for each in read)
        self._tasks = self._check_interface(session)
        self._session = session
        return self

    def __exit__(self, *_: object) -> None:
        self._session = self._tasks = None
        self._stores = ()

    def for_task(self, task: TaskTensors) -> TaskRunner:
        """This engine, open, with the tensors of ``task`` in place of the base's. Raises BundleError while inactive."""
        self._active()
        return TaskRunner(self, task)

    def run(self, feeds: Mapping[str, Array], routing: bool = False, task: TaskTensors | None = None) -> list[Array]:
        """See ``Runner.run``; the base answers unless there is a ``task``. Raises InputError where ONNX Runtime refuses
        the values, BundleError while inactive or where the weight store was written to."""
        session, stores, tasks = self._active(), self._stores, self._tasks
        names = self._all_names if routing else self._output_names
        for store in stores:
            store.require_unchanged()
        try:
            outputs: list[Array]
            outputs = session.run(names, feeds) if tasks is None else tasks.run(session, names, feeds, task)
        except BaseException as failure:
            if not is_of_library(failure):
                raise
            raise InputError(f"engine {self.engine.id}: {said_by(failure)}") from failure
        for store in stores:
            store.require_unchanged()
        return outputs

    def bind(
        self, feeds: Mapping[str, Array], outputs: Mapping[str, Array], task: TaskTensors | None = None
    ) -> Callable[[], None]:
        """See ``Runner.bind``; the base answers unless there is a ``task``.

        Measured on two inputs and three outputs of a graph that does next to nothing: 23 us a run with a binding made
        for it, 5 us with one that is kept, 9 us for a run that allocates and returns its outputs. So callers with
        buffers of their own keep the call.
        """
        session, stores = self._active(), self._stores
        binding = session.io_binding()
        shape = nearest_shape(self._inputs, feeds, self.engine.bucket)
        # ONNX Runtime would read or write past or beside an array that does not fit, or a copy of a strided one.
        sizes = {**named_sizes(self._inputs, feeds), "batch": shape.batch, "sequence": shape.sequence}
        layout = layout_of(self._inputs, self._outputs, shape, sizes)
        if problem := layout.misfit(feeds, outputs):
            raise InputError(f"engine {self.engine.id}: {problem}")
        for arrays, bind in ((feeds, binding.bind_ortvalue_input), (outputs, binding.bind_ortvalue_output)):
            for name, array in arrays.items():
                bind(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        if self._tasks is not None:
            for name, value in self._tasks.values(task).items():
                binding.bind_ortvalue_input(name, value)
        kept = (*feeds.values(), *outputs.values())  # the binding holds their addresses alone

        def call() -> None:
            if self._session is not session or not kept:
                raise BundleError(f"engine {self.engine.id}: not open; run it inside its `with` block")
            for store in stores:
                store.require_unchanged()
            try:
                session.run_with_iobinding(binding)
            except BaseException as failure:
                if not is_of_library(failure):
                    raise
                raise InputError(f"engine {self.engine.id}: {said_by(failure)}") from failure
            for store in stores:
                store.require_unchanged()

        return call

    def _active(self) -> Any:
        session = self._session
        if session is None:
            raise BundleError(f"engine {self.engine.id}: not open; run it inside its `with` block")
        return session

    def _check_interface(self, session: Any) -> TaskInputs | None:
        """The engine has exactly the manifest's inputs, outputs and routes, with its bucket's sizes. Returns its inputs
        for tasks, if it has any."""
        own = {spec.name for spec in self._inputs}
        given = [tensor for tensor in session.get_inputs() if tensor.name in own or self._bundle.manifest.tasks is None]
        require_tensors(self.engine, "inputs", given, self._inputs)
        require_tensors(self.engine, "outputs", session.get_outputs(), (*self._outputs, *routes_of(self.engine)))
        if self._bundle.manifest.tasks is None:
            return None
        return TaskInputs(self._bundle, self.engine, [one for one in session.get_inputs() if one.name not in own])

    def _options(self, level: Any, packed: bool) -> Any:
        spin_us = STEP_SPIN_US if isinstance(self.engine.kind, Decode) else SPIN_US
        options = session_options(self._threads, level, packed, self._affinity, spin_us)
        if PRECISIONS[self.engine.precision].encoding in (*HALF_ENCODINGS, *FOUR_BITS):
            # In the order of the graph a half, or 4 bits of a proof, are widened where they are read; by default all
            # are, at the beginning.
            options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        return options

    def _mapped_session(self, path: Path) -> Any:
        as_saved = self._options(OPTIMIZATION_LEVEL, packed=True)

        def build(target: Path, weights_name: str) -> None:
            options = self._options(SAVED_OPTIMIZATION_LEVEL, packed=True)
            options.optimized_model_filepath = str(target)
            options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
            options.add_session_config_entry("session.optimized_model_external_initializers_file_name", weights_name)
            options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
            packed = open_session(path, options)  # other settings: raise _PACKING_VERSION in mapped_cache.py
            tasks = self._check_interface(packed)
            feeds = random_feeds(self._inputs, self.engine.bucket.nearest(_TRIED_SHAPE))
            feeds |= tasks.arrays() if tasks is not None else {}
            saved_session = open_session(target, as_saved)
            with library_errors(lambda said: BundleCorruptError(f"engine {self.engine.id}: does not run: {said}")):
                pairs = list(zip(packed.run(None, feeds), saved_session.run(None, feeds), strict=True))
            if not all(np.array_equal(here, saved, equal_nan=True) for here, saved in pairs):
                raise BundleIncompatibleError(
                    f"engine {self.engine.id}: onnxruntime {onnxruntime.__version__} does not read its packed form "
                    "back as it was; use `residency='packed'` or `residency='shared'`"
                )

        return open_session(mapped_engine(self._bundle, self.engine, build), as_saved)


class TaskRunner:
    """An engine that somebody else opens and closes, with the tensors of one task; see ``Runner``."""

    def __init__(self, engine: OnnxRuntimeRunner, task: TaskTensors) -> None:
        self._engine, self._task = engine, task

    def __enter__(self) -> TaskRunner:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing: the engine stays open."""

    def run(self, feeds: Mapping[str, Array], routing: bool = False) -> list[Array]:
        return self._engine.run(feeds, routing, self._task)

    def bind(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
        return self._engine.bind(feeds, outputs, self._task)
