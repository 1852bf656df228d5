"""ONNX files of any producer, in ONNX Runtime on the processor, optimised as they would be in use.

None is trusted: external data must lie in the file's own folder, and custom operators are loaded from a library that
the caller names. Weights inside the file stay there: the graph that is kept names their places in it.
"""

import math
import mmap
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from ..compiler.work.tensor_file import release_pages
from ..errors import InputError
from ..optional import needed
from ..outside import library_errors
from ..outside_file import open_file
from ..profiles.precision import Precision
from ..runtime.inputs.arrays import Array, Arrays
from .export import Export, Port, Value, module_in

_MOST_GRAPH_BYTES = 2**31
_LEFT_IN_FILE = 1024  # bytes of a weight that is worth its place
_VALUES_AT_ONCE = 128
# By ONNX's numbers of element types; bfloat16 has no numpy type of its own and is given as float32.
_DTYPES = {1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64"}
_FLOATS: Mapping[int, Precision] = {1: "fp32", 10: "fp16", 11: "fp32", 16: "bf16"}
_DYNAMIC_INTEGERS = {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul"}
_INTEGERS = {"QLinearMatMul", "QLinearConv", "QLinearAdd", "QGemm", "QuantizeLinear", "QAttention"}
_FOUR_BITS = {21, 22}  # uint4, int4
# Where an exporter leaves the module that a node is of: torch.export's scopes, from the outermost to the innermost.
_SCOPES = "pkg.torch.onnx.name_scopes"


class OnnxExport(Export):
    """An ONNX file, with external data or without."""

    kind = "ONNX"

    def __init__(self, path: Path, library: Path | None = None) -> None:
        self._onnx = onnx = needed("onnx", f"{path}", "onnx", "install nestforge[compile]")
        self.label, self.path, self._library = str(path), path.resolve(), library
        with open_file(path, InputError):
            pass
        with library_errors(lambda said: InputError(f"{path}: is no ONNX file ({said})")):
            if path.stat().st_size > _MOST_GRAPH_BYTES:
                raise ValueError("more than 2 GiB")
            graph = onnx.load(path, load_external_data=False)
            if not graph.graph.output:
                raise ValueError("it has no graph with outputs")
        self.files = (self.path, *self._external(graph))
        self._leave_weights(graph)
        self.graph = onnx.ModelProto()
        self.graph.CopyFrom(graph)  # what was cleared is held until the whole is gone
        stored = {tensor.name for tensor in graph.graph.initializer}
        self.inputs = tuple(_port(value) for value in graph.graph.input if value.name not in stored)
        self.outputs = tuple(_port(value) for value in graph.graph.output)
        self.precision = _precision(graph)
        self._open: Any = None

    def _external(self, graph: Any) -> list[Path]:
        """Files of external data. Raises InputError for one that is missing, too short or outside the folder."""
        folder, found = self.path.parent, dict[Path, None]()
        for tensor in (tensor for each in _graphs(graph.graph) for tensor in each.initializer):
            stated = {entry.key: entry.value for entry in tensor.external_data}
            if not stated:
                continue
            where = f"{self.label}: external data {stated.get('location', '')!r:.200}"
            file = folder / stated.get("location", "")
            if ".." in file.parts or folder not in file.resolve().parents:
                raise InputError(f"{where} lies outside its folder; refused")
            start, size = stated.get("offset", "0"), stated.get("length", "0")
            if not (start.isdecimal() and size.isdecimal()):
                raise InputError(f"{where} at {start!r:.40}, {size!r:.40} bytes; expected numbers")
            if not file.is_file():
                raise InputError(f"{where} is missing; expected it beside the file")
            if (end := int(start) + int(size)) > file.stat().st_size:
                raise InputError(f"{where} has {file.stat().st_size} bytes, but {self.path.name} reads up to {end}")
            found[file] = None
        return list(found)

    def _leave_weights(self, graph: Any) -> None:
        """Names for each weight the place in the file where its bytes are."""
        at = 0
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for tensor in graph.graph.initializer:
                raw = tensor.raw_data
                place = data.find(raw, at) if len(raw) > _LEFT_IN_FILE else -1
                if place < 0:
                    continue
                at = place + len(raw)
                tensor.ClearField("raw_data")
                tensor.data_location = self._onnx.TensorProto.EXTERNAL
                for key, value in {"location": self.path.name, "offset": place, "length": len(raw)}.items():
                    tensor.external_data.add(key=key, value=str(value))

    def run(self, feeds: Arrays) -> dict[str, Array]:
        self.ready()
        names = [port.name for port in self.outputs]
        with library_errors(InputError):
            return dict(zip(names, self._open.run(names, dict(feeds)), strict=True))

    def ready(self) -> None:
        if self._open is None:
            needed("onnxruntime", self.label, "onnxruntime", "install nestforge[cpu]")
            from ..compiler.parity.engine_verdict import open_graph

            with self._refused():
                self._open = open_graph(self.graph, self.path.parent, self._library)

    def rest(self) -> None:
        self._open = None

    def _refused(self) -> AbstractContextManager[None]:
        advice = "" if self._library else "; `library` loads operators that are not its own"
        return library_errors(lambda said: InputError(f"{self.label}: ONNX Runtime does not run it ({said}){advice}"))

    def values(self, feeds: Arrays, sizes: Collection[int]) -> Iterator[Value]:
        """Without ONNX Runtime's own fusions, so that every value of the file is there. Values that a session may
        return lie in memory until its run ends, so that each has some of the values."""
        from ..compiler.parity.engine_verdict import open_values

        self.rest()
        release_pages()
        model = self._onnx.ModelProto()
        model.CopyFrom(self.graph)
        self._take_branches(model.graph, feeds)
        made = {name: node for node in model.graph.node for name in node.output if name}
        names = list(made)
        for start in range(0, len(names), _VALUES_AT_ONCE):
            with self._refused():
                some = names[start : start + _VALUES_AT_ONCE]
                session, floats = open_values(model, some, self.path.parent, self._library)
                arrays = session.run(floats, dict(feeds)) if floats else []
            for name, array in zip(floats, arrays, strict=True):
                if array.size in sizes:
                    node = made[name]
                    yield Value(name, node.name or name, node.op_type, _module_of(node), array)

    def _take_branches(self, graph: Any, feeds: Arrays) -> None:
        """Puts what an input decides in the place of the decision, as of a merged decoder with and without a past."""
        nodes = []
        for node in graph.node:
            chosen = feeds.get(node.input[0]) if node.op_type == "If" else None
            if chosen is None:
                nodes.append(node)
                continue
            name = "then_branch" if chosen.all() else "else_branch"
            branch = next(attribute.g for attribute in node.attribute if attribute.name == name)
            graph.initializer.extend(branch.initializer)
            pairs = zip(branch.output, node.output, strict=True)
            nodes += [*branch.node, *(self._onnx.helper.make_node("Identity", [a.name], [b]) for a, b in pairs)]
        del graph.node[:]
        graph.node.extend(nodes)

    def weights(self, size: int) -> Iterator[Array]:
        graphs = list(_graphs(self.graph.graph))
        nodes = [node for graph in graphs for node in graph.node if node.op_type == "Constant"]
        constants = [attribute.t for node in nodes for attribute in node.attribute if attribute.name == "value"]
        for tensor in (*(tensor for graph in graphs for tensor in graph.initializer), *constants):
            if tensor.data_type in _FLOATS and size == math.prod(tensor.dims):
                with library_errors(lambda said: InputError(f"{self.path}: a weight cannot be read ({said})")):
                    yield self._array(tensor).astype(np.float32, copy=False)

    def _array(self, tensor: Any) -> Array:
        if not tensor.external_data:
            return np.asarray(self._onnx.numpy_helper.to_array(tensor))
        stated = {entry.key: entry.value for entry in tensor.external_data}
        dtype, file = (
            self._onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type),
            self.path.parent / stated["location"],
        )
        return np.memmap(file, dtype, "r", int(stated.get("offset", 0)), tuple(tensor.dims))

    def module_of(self, node: str) -> tuple[str | None, str]:
        found = next((each for each in self.graph.graph.node if each.name == node), None)
        return (None, "") if found is None else (_module_of(found), found.op_type)


def _graphs(graph: Any) -> Iterator[Any]:
    """``graph`` and those of its branches and loops."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _module_of(node: Any) -> str | None:
    """By torch.export's scopes in its metadata, or TorchScript's path in its name."""
    for entry in node.metadata_props:
        if entry.key == _SCOPES:
            scopes = [part.strip(" '\"") for part in entry.value.strip("[]").split(",")]
            return scopes[-2] if len(scopes) > 1 else None
    return module_in(node.name)


def _port(value: Any) -> Port:
    kind = value.type.tensor_type
    dims: tuple[int | str, ...] | None = None
    if kind.HasField("shape"):
        dims = tuple(
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or f"?{place}"
            for place, dim in enumerate(kind.shape.dim)
        )
    return Port(value.name, _DTYPES.get(kind.elem_type, "float32"), dims)


def _precision(model: Any) -> Precision:
    """From the operators and the types of stored tensors: of integers the products alone, of floats what most numbers
    have."""
    graphs = list(_graphs(model.graph))
    operators = {node.op_type for graph in graphs for node in graph.node}
    tensors = [tensor for graph in graphs for tensor in graph.initializer]
    if "MatMulNBits" in operators or any(tensor.data_type in _FOUR_BITS for tensor in tensors):
        return "int4"
    if operators & _DYNAMIC_INTEGERS:
        return "int8-dynamic"
    if operators & _INTEGERS:
        return "int8"
    sizes: dict[Precision, int] = {"fp32": 0}
    for tensor in tensors:
        if kind := _FLOATS.get(tensor.data_type):
            sizes[kind] = sizes.get(kind, 0) + math.prod(tensor.dims)
    return max(sizes, key=lambda kind: sizes[kind])
