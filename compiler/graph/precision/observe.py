"""Runs a float32 engine and shows the values inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from ....runtime.inputs.arrays import Arrays

# Of values that one session returns; what is more is left to another.
_PART_BYTES = 64 << 20
_ELEMENT_BYTES = 4


def observe(
    graph: onnx.ModelProto,
    folder: Path,
    names: Sequence[str],
    feeds: Iterable[Arrays],
    see: Callable[[str, np.ndarray, int], None],
) -> None:
    """Calls ``see(name, array, number)`` for each of ``names`` (values of the graph, or inputs of it) and each of
    ``feeds``; ``number`` says which.

    ``graph`` is an emitted engine whose weights lie in ``folder``, where it is written for as long as this takes.
    Memory stays bounded: many or large values are returned by several sessions, one after the other.
    """
    examples = list(feeds)
    inputs = {value.name for value in graph.graph.input}
    for name in inputs.intersection(names):
        for number, arrays in enumerate(examples):
            see(name, arrays[name], number)
    for part in _parts(graph, [name for name in dict.fromkeys(names) if name not in inputs]):
        session = _session(graph, folder, part)
        path = onnxruntime.RunOptions()
        path.only_execute_path_to_fetches = True  # nothing behind the last of them
        for number, arrays in enumerate(examples):
            for name, array in zip(part, session.run(part, dict(arrays), path), strict=True):
                see(name, array, number)


def _parts(graph: onnx.ModelProto, names: Sequence[str]) -> Iterator[list[str]]:
    """``names`` in groups whose values take at most _PART_BYTES together, or that hold one value."""
    known = onnx.shape_inference.infer_shapes(graph).graph
    shapes = {value.name: value.type.tensor_type.shape for value in (*known.value_info, *known.output)}
    part: list[str] = []
    total = 0
    for name in names:
        extents = [dim.dim_value for dim in shapes[name].dim] if name in shapes else [_PART_BYTES]
        size = prod(extents) * _ELEMENT_BYTES
        if part and total + size > _PART_BYTES:
            yield part
            part, total = [], 0
        part.append(name)
        total += size
    if part:
        yield part


def _session(graph: onnx.ModelProto, folder: Path, outputs: Iterable[str]) -> onnxruntime.InferenceSession:
    """A session of the graph, weights mapped, that returns ``outputs``; its file is gone again."""
    model = onnx.ModelProto()
    model.CopyFrom(graph)
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    path = folder / "observe.onnx"
    try:
        path.write_bytes(model.SerializeToString())
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    finally:
        path.unlink(missing_ok=True)
