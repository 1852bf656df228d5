"""An export of any kind, opened: its inputs and outputs, the precision that its file shows, and its answers.

Kinds stand in ``KINDS``, each with what it is recognised by. None is trusted: an ONNX file names external data, which
must lie in its own folder; custom operators are loaded from a library that the caller names.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..optional import needed
from ..outside import library_errors
from ..outside_file import open_file
from ..profiles.precision import Precision
from ..runtime.inputs.arrays import Array, Arrays

_MOST_GRAPH_BYTES = 2**31
# By ONNX's numbers of element types; bfloat16 has no numpy type of its own and is given as float32.
_DTYPES = {1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64"}
_HALF_TYPES: Mapping[int, Precision] = {10: "fp16", 16: "bf16"}
_DYNAMIC_INTEGERS = {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul"}
_INTEGERS = {"QLinearMatMul", "QLinearConv", "QLinearAdd", "QGemm", "QuantizeLinear", "QAttention"}
_FOUR_BITS = {21, 22}  # uint4, int4
# Where an exporter leaves the module that a node is of: torch.export's scopes, from the outermost to the innermost.
_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True)
class Port:
    """An input or output as the export declares it; a dimension is its size, or a name where it is dynamic."""

    name: str
    dtype: str
    dims: tuple[int | str, ...] | None = None

    def __str__(self) -> str:
        shape = "?" if self.dims is None else ",".join(map(str, self.dims))
        return f"{self.name} {self.dtype}[{shape}]"


@dataclass(frozen=True)
class Value:
    """One intermediate value of an export: its name, the node and operator that made it, the module that the exporter
    left for that node (None without), and the value on one case."""

    name: str
    node: str
    operator: str
    module: str | None
    array: Array


class Export(ABC):
    """One graph that answers. ``folder``'s other graphs are exports of their own."""

    label: str
    kind: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    precision: Precision = "fp32"
    files: tuple[Path, ...] = ()
    # Lengths that the exporter traced at, where it says so.
    traced: tuple[int, ...] = ()
    # Rows and length of the largest input that it says it takes.
    largest: tuple[int, int] | None = None

    def ready(self) -> None:  # noqa: B027  (most are, once opened)
        """Whatever comes before the first answer. Raises InputError for a graph that nothing runs."""

    @abstractmethod
    def run(self, feeds: Arrays) -> dict[str, Array]:
        """Outputs by name. Raises InputError with what the runtime said."""

    def values(self, feeds: Arrays) -> list[Value]:  # noqa: ARG002
        """Every intermediate value in the order of the graph; none where the kind shows none."""
        return []

    def weights(self, size: int | None = None) -> dict[str, Array]:  # noqa: ARG002
        """Constants by name, in float32, of so many numbers where a ``size`` is given; none where the kind shows
        none."""
        return {}

    def close(self) -> None:  # noqa: B027  (most hold nothing that outlives them)
        """Gives back what it holds."""

    def port(self, name: str) -> Port | None:
        return next((port for port in self.inputs if port.name == name), None)


class OnnxExport(Export):
    """An ONNX file in ONNX Runtime on the processor, optimised as it would be in use."""

    kind = "ONNX"

    def __init__(self, path: Path, library: Path | None = None) -> None:
        onnx = needed("onnx", f"{path}", "onnx", "install nestforge[compile]")
        self.label, self._library = str(path), library
        with open_file(path, InputError):
            pass
        with library_errors(lambda said: InputError(f"{path}: is no ONNX file ({said})")):
            if path.stat().st_size > _MOST_GRAPH_BYTES:
                raise ValueError("more than 2 GiB")
            self.graph = onnx.load(path, load_external_data=False)
            if not self.graph.graph.output:
                raise ValueError("it has no graph with outputs")
        self.path = path
        self.files = (path, *self._external())
        stored = {tensor.name for tensor in self.graph.graph.initializer}
        self.inputs = tuple(_port(value) for value in self.graph.graph.input if value.name not in stored)
        self.outputs = tuple(_port(value) for value in self.graph.graph.output)
        self.precision = _precision(self.graph)
        self.producer = f"{self.graph.producer_name} {self.graph.producer_version}".strip() or "an unnamed producer"
        self._open: Any = None

    def _external(self) -> list[Path]:
        """Files of external data. Raises InputError for one that is missing, too short or outside the folder."""
        folder, found = self.path.resolve().parent, dict[Path, int]()
        for tensor in self.graph.graph.initializer:
            stated = {entry.key: entry.value for entry in tensor.external_data}
            if not stated:
                continue
            place = Path(stated.get("location", ""))
            file = folder / place
            if place.is_absolute() or ".." in place.parts or folder not in file.resolve().parents:
                raise InputError(f"{self.path}: external data {str(place)!r:.200} lies outside its folder; refused")
            start, size = stated.get("offset", "0"), stated.get("length", "0")
            if not (start.isdecimal() and size.isdecimal()):
                raise InputError(f"{self.path}: external data at {start!r:.40}, {size!r:.40} bytes; expected numbers")
            end = int(start) + int(size)
            found[file] = max(end, found.get(file, 0))
        for file, end in found.items():
            if not file.is_file():
                raise InputError(f"{self.path}: external data {file.name} is missing; expected it beside the file")
            if file.stat().st_size < end:
                raise InputError(f"{file}: {file.stat().st_size} bytes, but {self.path.name} reads up to byte {end}")
        return list(found)

    def run(self, feeds: Arrays) -> dict[str, Array]:
        names = [port.name for port in self.outputs]
        with library_errors(InputError):
            return dict(zip(names, self._session().run(names, dict(feeds)), strict=True))

    def ready(self) -> None:
        self._session()

    def _session(self) -> Any:
        if self._open is None:
            self._open = self._opened(self.path)
        return self._open

    def _opened(self, graph: Path | bytes, exact: bool = False) -> Any:
        runtime = needed("onnxruntime", self.label, "onnxruntime", "install nestforge[cpu]")
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        if exact:
            options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        with library_errors(lambda said: InputError(f"{self.label}: ONNX Runtime does not run it ({said})")):
            if self._library is not None:
                options.register_custom_ops_library(str(self._library))
            return runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"], enable_fallback=0)

    def close(self) -> None:
        self._open = None

    def values(self, feeds: Arrays) -> list[Value]:
        """Computed without ONNX Runtime's own fusions, so that every value of the file is there."""
        onnx = needed("onnx", self.label, "onnx", "install nestforge[compile]")
        model = onnx.ModelProto()
        model.CopyFrom(self.graph)
        types = _element_types(onnx, model)
        made = [(node, name) for node in model.graph.node for name in node.output if name]
        wanted = [(node, name) for node, name in made if types.get(name) in (1, 10, 11)]
        del model.graph.output[:]
        model.graph.output.extend(onnx.helper.make_tensor_value_info(name, types[name], None) for _, name in wanted)
        path = self.path.parent / f".{self.path.name}.{id(self)}.values.onnx"  # beside its external data
        try:
            path.write_bytes(model.SerializeToString())
            session = self._opened(path, exact=True)
        finally:
            path.unlink(missing_ok=True)
        with library_errors(InputError):
            arrays = session.run([name for _, name in wanted], dict(feeds))
        return [
            Value(name, node.name or name, node.op_type, module_of(node), array)
            for (node, name), array in zip(wanted, arrays, strict=True)
        ]

    def weights(self, size: int | None = None) -> dict[str, Array]:
        onnx = needed("onnx", self.label, "onnx", "install nestforge[compile]")
        found = {}
        tensors = [(tensor.name, tensor) for tensor in self.graph.graph.initializer]
        tensors += [
            (node.output[0], attribute.t)
            for node in self.graph.graph.node
            if node.op_type == "Constant"
            for attribute in node.attribute
            if attribute.name == "value"
        ]
        for name, tensor in tensors:
            if tensor.data_type in (1, 10, 11, 16) and size in (None, math.prod(tensor.dims)):
                with library_errors(lambda said: InputError(f"{self.path}: a weight cannot be read ({said})")):
                    array = onnx.numpy_helper.to_array(tensor, str(self.path.parent))
                found[name] = array.astype(np.float32)
        return found


class OpenVinoExport(Export):
    """An OpenVINO IR, an XML file with its weights beside it, on the processor."""

    kind = "OpenVINO IR"

    def __init__(self, path: Path, library: Path | None = None) -> None:
        self.label, self._library = str(path), library
        self._openvino = needed("openvino", f"{path}", "openvino", "install nestforge[openvino]")
        weights = path.with_suffix(".bin")
        if not weights.is_file():
            raise InputError(f"{path}: its weights {weights.name} are missing; expected them beside the file")
        self._core = self._openvino.Core()
        with library_errors(lambda said: InputError(f"{path}: OpenVINO does not read it ({said})")):
            if library is not None:
                self._core.add_extension(str(library))
            self._model = self._core.read_model(path)
        self.files = (path, weights)
        self.inputs = tuple(self._port(port) for port in self._model.inputs)
        self.outputs = tuple(self._port(port) for port in self._model.outputs)
        kinds = {op.get_element_type().get_type_name() for op in self._constants_of()}
        self.precision = "fp16" if "f16" in kinds else "bf16" if "bf16" in kinds else "fp32"
        if kinds & {"u4", "i4"}:
            self.precision = "int4"
        elif kinds & {"i8", "u8"}:
            self.precision = "int8"
        self._compiled: Any = None

    def _constants_of(self) -> list[Any]:
        return [op for op in self._model.get_ops() if op.get_type_name() == "Constant" and len(op.shape) > 1]

    def _port(self, port: Any) -> Port:
        shape = port.get_partial_shape()
        dims = (
            tuple(f"?{place}" if dim.is_dynamic else dim.get_length() for place, dim in enumerate(shape))
            if shape.rank.is_static
            else None
        )
        kinds = {"f32": "float32", "f16": "float16", "i64": "int64", "i32": "int32", "boolean": "bool"}
        return Port(port.get_any_name(), kinds.get(port.get_element_type().get_type_name(), "float32"), dims)

    def run(self, feeds: Arrays) -> dict[str, Array]:
        with library_errors(InputError):
            if self._compiled is None:
                self._compiled = self._core.compile_model(self._model, "CPU", _EXACT)
            found = self._compiled(dict(feeds))
            return {port.name: found[place] for place, port in enumerate(self.outputs)}

    def values(self, feeds: Arrays) -> list[Value]:
        model = self._model.clone()
        left_out = {"Parameter", "Result", "Constant"}
        made = [op for op in model.get_ordered_ops() if op.get_type_name() not in left_out]
        floats = [op for op in made if op.get_output_element_type(0).get_type_name() in ("f32", "f16")]
        with library_errors(InputError):
            results = [self._openvino.opset13.result(op.output(0)) for op in floats]
            model.add_results(results)
            compiled = self._core.compile_model(model, "CPU", _EXACT)
            found = compiled(dict(feeds))
        arrays = [found[len(self.outputs) + place].copy() for place in range(len(floats))]
        return [
            Value(
                op.get_friendly_name(), op.get_friendly_name(), op.get_type_name(), module_in(op.get_friendly_name()), a
            )
            for op, a in zip(floats, arrays, strict=True)
        ]

    def weights(self, size: int | None = None) -> dict[str, Array]:
        constants = [op for op in self._constants_of() if size in (None, math.prod(op.shape))]
        return {op.get_friendly_name(): op.get_data().astype(np.float32) for op in constants}


# Left to itself OpenVINO computes in bf16 where the processor has that.
_EXACT = {"INFERENCE_PRECISION_HINT": "f32"}


def module_of(node: Any) -> str | None:
    """The module that an exporter left for ``node``: torch.export's scopes in its metadata, or TorchScript's path in
    its name (``/encoder/layer.0/attention/self/query/MatMul``)."""
    for entry in node.metadata_props:
        if entry.key == _SCOPES:
            scopes = [part.strip(" '\"") for part in entry.value.strip("[]").split(",")]
            return scopes[-2] if len(scopes) > 1 else None
    return module_in(node.name)


def module_in(name: str) -> str | None:
    """The module in a node's name, where it is a path."""
    return ".".join(name.split("/")[1:-1]) or None if name.startswith("/") else None


def _port(value: Any) -> Port:
    kind = value.type.tensor_type
    dims: tuple[int | str, ...] | None = None
    if kind.HasField("shape"):
        dims = tuple(
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or f"?{place}"
            for place, dim in enumerate(kind.shape.dim)
        )
    return Port(value.name, _DTYPES.get(kind.elem_type, "float32"), dims)


def _element_types(onnx: Any, model: Any) -> dict[str, int]:
    """Types of values by name; behind operators that inference does not know, that of the first input that has one."""
    try:
        shaped = onnx.shape_inference.infer_shapes(model)
    except Exception:  # noqa: BLE001  (it helps where it can)
        shaped = model
    known = (*shaped.graph.value_info, *shaped.graph.output, *shaped.graph.input)
    types = {value.name: value.type.tensor_type.elem_type for value in known if value.type.HasField("tensor_type")}
    types |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for node in model.graph.node:
        given = next((types[name] for name in node.input if types.get(name) in (1, 10, 11)), None)
        if given is not None and node.domain not in ("", "ai.onnx") and not node.op_type.startswith("Q"):
            types.setdefault(node.output[0], given)
    return types


def _precision(model: Any) -> Precision:
    """From the operators and the types of stored tensors: of integers the products alone, of floats what most bytes
    have."""
    operators = {node.op_type for node in model.graph.node}
    tensors = model.graph.initializer
    if "MatMulNBits" in operators or any(tensor.data_type in _FOUR_BITS for tensor in tensors):
        return "int4"
    if operators & _DYNAMIC_INTEGERS:
        return "int8-dynamic"
    if operators & _INTEGERS:
        return "int8"
    sizes: dict[Precision, int] = {"fp32": 0}
    for tensor in tensors:
        if tensor.data_type in (1, 10, 11, 16):
            kind = _HALF_TYPES.get(tensor.data_type, "fp32")
            sizes[kind] = sizes.get(kind, 0) + int(np.prod(tensor.dims))
    return max(sizes, key=lambda kind: sizes[kind])


def _graphs(folder: Path) -> list[Path]:
    """The graphs of a folder of optimum or transformers.exporters; those of `onnx/` where there are none above."""
    found = sorted(folder.glob("*.onnx")) or sorted((folder / "onnx").glob("*.onnx"))
    return found or sorted(folder.glob("*.xml"))


def _folder(folder: Path, library: Path | None) -> list[Export]:
    return [export for path in _graphs(folder) for export in open_exports(path, library)]


# By what a path is; the first that holds opens it.
KINDS: Sequence[tuple[str, Callable[[Path], bool], Callable[[Path, Path | None], list[Export]]]] = (
    ("a folder with ONNX or OpenVINO graphs", lambda path: path.is_dir() and bool(_graphs(path)), _folder),
    ("an OpenVINO IR", lambda path: path.suffix == ".xml", lambda path, library: [OpenVinoExport(path, library)]),
    ("an ONNX file", lambda path: path.suffix == ".onnx", lambda path, library: [OnnxExport(path, library)]),
)


def open_exports(export: Path | str, library: Path | None = None) -> list[Export]:
    """The graphs of ``export``. Raises InputError, one line, for what is none or cannot be opened."""
    path = Path(export)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; expected {' or '.join(kind for kind, _, _ in KINDS)}")
    for _, is_one, opened in KINDS:
        if is_one(path):
            return opened(path, library)
    raise InputError(f"{path}: expected {' or '.join(kind for kind, _, _ in KINDS)}")
