"""``nestforge export --format onnx``: one submodel at one bucket as a plain ONNX file, which needs no bundle.

The graph is that of the engine. All that it reads of the weight store, views and tables alike, becomes initializers of
the submodel's shape inside the file, or in one file beside it where protobuf's limit of 2 GB is near; the tensors of a
task take the place of the inputs that it has. Needs onnx and ONNX Runtime; no torch and no checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from ...argument_types import checked
from ...bucket import Bucket
from ...bundle.device_files.plan_index import PlanParity
from ...bundle.device_files.task_index import read_tasks
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.manifest import MANIFEST_NAME
from ...bundle.open_bundle import Bundle
from ...errors import BundleIncompatibleError, ParityError, SelectionError
from ...profiles.backends import BACKENDS
from ...profiles.precision import PRECISIONS
from ...progress import Progress, silent
from ...runtime.device.threads import threads_or_default
from ...runtime.engines.onnxruntime.session import OPTIMIZATION_LEVEL, open_session, session_options
from ...runtime.graphs.initializers import Initializer, files_of
from ...runtime.graphs.task_tensors import TaskTensors, base_tensors, read_task_tensors
from ...runtime.graphs.weight_store import store_initializers
from ...runtime.inputs.arrays import Array
from ...strict import nearest
from ...whole_file import exporting, name_new, require_new, sync_folder
from ..graph.precision.proof_graphs import proof_bundle
from ..tensorrt.check_plan import check_plan

# Weights of more bytes lie beside the file: a protobuf message has less than 2^31, nodes and names included.
_MOST_INSIDE = 2_000_000_000
# Places in the file of weights are multiples of it, so that whoever maps them finds numbers aligned.
_ALIGNMENT = 64
_COPIED_BYTES = 2**24


@dataclass(frozen=True)
class OnnxExport:
    """Files of an export: ``files``, the ONNX file first, of so many ``bytes`` in all. With the options of the bundle's
    engine ONNX Runtime gave its very numbers; ``parity`` is with its own options."""

    files: tuple[str, ...]
    bytes: int
    submodel: str
    bucket: Bucket
    precision: str
    task: str | None
    parity: PlanParity


@checked
def export_onnx(
    bundle: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    submodel: str | None = None,
    bucket: Bucket | None = None,
    task: str | None = None,
    progress: Progress = silent,
) -> OnnxExport:
    """Writes ``submodel`` (the largest) at ``bucket`` (its only one) as the ONNX file ``output``, with its weights in
    ``OUTPUT.data`` beside it where they exceed 2 GB, once the written file was found to answer as the engine does.

    Inputs and outputs keep their names, types and sizes, routes too. Raises SelectionError for what the bundle does not
    have, BundleIncompatibleError for an engine that no ONNX Runtime on a processor runs as it was proven, another
    BundleError, ParityError, OutputError.
    """
    from ...runtime.load import verify_bytes

    path = Path(output).absolute()
    beside = path.with_name(f"{path.name}.data")
    for each in (path, beside):
        require_new(each)
    progress("hashes", 0, 1)
    opened = verify_bytes(bundle).bundle
    engine = chosen_engine(opened, submodel, bucket)
    with exporting(path) as folder, proof_bundle(opened) as here:
        written = write_compared(opened, here, engine, task, folder / path.name, folder / beside.name, progress)
        files = [Path(file) for file in written.files]
        _publish(files, path.parent)
    return replace(written, files=tuple(str(path.with_name(file.name)) for file in files))


def write_compared(
    bundle: Bundle,
    here: Bundle,
    engine: EngineEntry,
    task: str | None,
    path: Path,
    beside: Path | None,
    progress: Progress = silent,
) -> OnnxExport:
    """Writes the file ``path``, with many weights in ``beside`` it; for None they are read of the files of the weight
    store, which lie in the folder of ``path``. ``here`` is the bundle as this host runs it. Raises ParityError."""
    tensors = None if task is None else _task(bundle, engine, task)
    progress("write", 0, 1)
    files = _write(bundle, engine, tensors, path, beside)
    progress("compare", 0, 1)
    parity = _compared(here, engine, tensors, path)
    size = sum(file.stat().st_size for file in files)
    return OnnxExport(tuple(map(str, files)), size, engine.submodel, engine.bucket, engine.precision, task, parity)


def chosen_engine(bundle: Bundle, submodel: str | None, bucket: Bucket | None) -> EngineEntry:
    """The whole engine that is exported."""
    manifest = bundle.manifest
    entry = manifest.largest_first[0] if submodel is None else manifest.submodel(submodel)
    engines = [one for one in manifest.engines if one.submodel == entry.id and one.segment is None]
    found = [one for one in engines if bucket is None or one.bucket == bucket]
    if len({one.bucket for one in found}) != 1:
        asked = "name one with `bucket`" if bucket is None else f"got {bucket}"
        raise SelectionError(f"submodel {entry.id}: has {', '.join(str(one.bucket) for one in engines)}; {asked}")
    for engine in found:
        is_proven = not BACKENDS[engine.backend].judged_by_itself
        if is_proven and not PRECISIONS[engine.precision].is_emulated:
            return engine
    raise BundleIncompatibleError(
        f"submodel {entry.id}: its engine in {found[0].precision} was proven for {BACKENDS[found[0].backend].title}, "
        "never by ONNX Runtime's own kernels; name another submodel, or compile for onnxruntime"
    )


def _task(bundle: Bundle, engine: EngineEntry, name: str) -> TaskTensors:
    known = {one.name: one for one in read_tasks(bundle)}
    if name not in known:
        raise SelectionError(f"no task {name!r:.80} in bundle {bundle.path}{nearest(name[:80], known)}")
    if engine.submodel not in known[name].submodels:
        raise SelectionError(f"task {name}: is for {', '.join(known[name].submodels)}, not for {engine.submodel}")
    return read_task_tensors(bundle, known[name])


def _write(
    bundle: Bundle, engine: EngineEntry, task: TaskTensors | None, path: Path, beside: Path | None
) -> list[Path]:
    """Writes the file ``path``, and ``beside`` where weights are too many, and returns them."""
    stored = store_initializers(bundle, engine)
    model = onnx.load_model_from_string(bundle.file(engine.file).read_bytes())
    files = [path]
    if beside is not None and _take_in(bundle, stored, model, beside):
        files.append(beside)
    _inputs_to_initializers(bundle, engine, task, model)
    for key, value in _metadata(bundle, engine, task).items():
        model.metadata_props.add(key=key, value=value)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return files


def _take_in(bundle: Bundle, stored: Sequence[Initializer], model: onnx.ModelProto, beside: Path) -> bool:
    """Takes what ``model`` reads of the weight store into it, or into ``beside`` where that is too much; whether it
    was."""
    by_name = {tensor.name: tensor for tensor in model.graph.initializer}
    apart = sum(one.bytes for one in stored) > _MOST_INSIDE
    places: dict[tuple[str, int, int], int] = {}
    with bundle.held(*files_of(stored)):
        for one in stored:
            tensor, view = by_name[one.name], (one.file, one.offset, one.bytes)
            del tensor.external_data[:]
            with bundle.file(one.file).open("rb") as store:
                store.seek(one.offset)
                if not apart:
                    tensor.raw_data = store.read(one.bytes)
                    tensor.data_location = onnx.TensorProto.DEFAULT
                    continue
                if view not in places:
                    places[view] = _append(store, one.bytes, beside)
            place = {"location": beside.name, "offset": str(places[view]), "length": str(one.bytes)}
            for name, value in place.items():
                tensor.external_data.add(key=name, value=value)
    return apart


def _append(store: Any, size: int, beside: Path) -> int:
    """Copies the next bytes of the weight store behind what ``beside`` has. Returns where they begin."""
    with beside.open("ab") as file:
        start = file.tell() + -file.tell() % _ALIGNMENT
        file.write(bytes(start - file.tell()))
        for left in range(size, 0, -_COPIED_BYTES):
            file.write(store.read(min(left, _COPIED_BYTES)))
    return start


def _inputs_to_initializers(
    bundle: Bundle, engine: EngineEntry, task: TaskTensors | None, model: onnx.ModelProto
) -> None:
    """Inputs that take tensors of a task have those of ``task``, or the base's, as initializers in their place."""
    requested = {spec.name for spec in bundle.manifest.interface_of(engine)[0]}
    own = [one for one in model.graph.input if one.name not in requested]
    for one in own:
        array = (task or base_tensors(bundle)).arrays[one.name]
        rows = one.type.tensor_type.shape.dim[0].dim_value
        model.graph.initializer.append(onnx.numpy_helper.from_array(array[:rows], one.name))
        model.graph.input.remove(one)


def _metadata(bundle: Bundle, engine: EngineEntry, task: TaskTensors | None) -> Mapping[str, str]:
    """Where the file comes from."""
    found = {
        "bundle": bundle.manifest.name,
        "manifest_sha256": bundle.sha256(MANIFEST_NAME),
        "submodel": engine.submodel,
        "bucket": str(engine.bucket),
        "precision": engine.precision,
        "engine_sha256": bundle.sha256(engine.file),
        "task": None if task is None else task.name,
    }
    return {f"nestforge.{name}": value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class _Session:
    """The written file as it is asked."""

    session: Any
    names: Sequence[str]

    def run(self, feeds: Mapping[str, Array], routing: bool = False) -> list[Array]:  # noqa: ARG002
        """Outputs, and routes behind them."""
        return self.session.run(self.names, dict(feeds))


def _compared(here: Bundle, engine: EngineEntry, task: TaskTensors | None, path: Path) -> PlanParity:
    """The file's answers by ONNX Runtime with its own options, held against those of the engine by the rule of its
    receipt. Both pack weights: kernels of int4 that do not are others, whose numbers are further off. Raises
    ParityError for those, and where the options of the engine that shares weights do not give its very numbers."""
    import onnxruntime

    outputs = here.manifest.interface_of(engine)[1]
    names = [*(spec.name for spec in outputs), *(entry.name for entry in engine.routing or ())]
    same = open_session(path, session_options(threads_or_default(None), OPTIMIZATION_LEVEL, packed=False))
    equal = check_plan(here, engine, _Session(same, names), what="the written file", task=task)
    if equal.max_abs or equal.left_out:
        raise ParityError(f"engine {engine.id}: the written file is off by {equal.max_abs:.3g} with the same kernels")
    del same
    plain = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    what = "the written file in plain ONNX Runtime"
    return check_plan(here, engine, _Session(plain, names), what=what, task=task, residency="packed")


def _publish(files: Sequence[Path], folder: Path) -> None:
    """Gives ``files`` their names in ``folder``, the first, which names the others, last. Raises OSError."""
    given: list[Path] = []
    try:
        for file in reversed(files):
            with file.open("rb") as written:
                os.fsync(written.fileno())
            name_new(file, folder / file.name)
            given.append(folder / file.name)
    except BaseException:
        for path in given:
            path.unlink()
        raise
    sync_folder(folder)
