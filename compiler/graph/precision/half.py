"""fp16 and bf16: a template whose types say where it computes in 16 bits, and where it does not.

``fp32_nodes.py`` says which nodes stay in float32. Here types follow: weights get the encoding of what reads them
(both, if both do), constants and tables are converted, and a value that is read in the other type is cast, once. Inputs
and outputs of the graph stay float32. No constant is added, so submodels are emitted from it as from the original.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ....profiles.precision import BF16, FP16, LEAST_INPUTS, LEAST_OUTPUTS
from ..edit import Edit
from ..encodings import table_name
from ..passes.contract import TRANSPOSED
from .fp32_nodes import FloatGraph, wide_nodes


@dataclass(frozen=True)
class _Narrow:
    """A 16-bit type: its number in ONNX, its numpy type, the ending of names of what was converted to it, and the
    smallest number that it has in full precision."""

    elem: int
    dtype: np.dtype[np.generic]
    suffix: str
    smallest: float

    def has(self, numbers: np.ndarray) -> bool:
        """Whether ``numbers`` come out finite, and a single one, such as an epsilon, with its full precision."""
        with np.errstate(over="ignore"):
            converted = numbers.astype(self.dtype).astype(np.float32)
        if not np.array_equal(np.isfinite(converted), np.isfinite(numbers)):
            return False
        return numbers.size != 1 or not numbers.any() or abs(float(numbers.item())) >= self.smallest


_SIXTEEN_BIT_TYPES = {
    "fp16": _Narrow(TensorProto.FLOAT16, np.dtype(np.float16), FP16, 2.0**-14),
    "bf16": _Narrow(TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16), BF16, 2.0**-126),
}
_WIDE_SUFFIX = ".fp32"


def half(
    proto: onnx.ModelProto,
    tables: Mapping[str, np.ndarray],
    precision: Literal["fp16", "bf16"],
    outputs: Collection[str],
) -> tuple[onnx.ModelProto, Mapping[str, np.ndarray]]:
    """The template ``proto`` with its ``tables`` in ``precision``, both; the heads of ``outputs`` stay float32.

    ``proto`` is left as it is. Values keep their names; a value cast to another type has that type's name behind its
    own. An output of the graph that is computed in 16 bits is cast under its own name.
    """
    writing = _Writing(proto, tables, _SIXTEEN_BIT_TYPES[precision])
    wide = wide_nodes(proto, outputs, writing.lost(), writing.narrow.elem)
    for node in proto.graph.node:
        writing.write(node, node.output[0] in wide)
    return writing.done(), writing.tables


def with_half_weights(
    proto: onnx.ModelProto, precision: Literal["fp16", "bf16"], whole: Collection[str]
) -> onnx.ModelProto:
    """The template ``proto`` with its matrices and tables in 16 bits, but for ``whole``, each widened where it is read;
    of a table the rows that are taken."""
    edit, narrow = Edit(proto), _SIXTEEN_BIT_TYPES[precision]
    halved = {name for name, tensor in edit.initializers.items() if name not in whole and _is_large(tensor)}
    widened: dict[str, str] = {}
    for node in edit.source:
        for place, name in enumerate(node.input):
            if name not in halved:
                continue
            node.input[place] = edit.encoded(name, narrow.suffix, narrow.elem, edit.initializers[name].dims)
            if node.op_type != "Gather":
                widened[name] = widened.get(name) or edit.add("Cast", [node.input[place]], to=TensorProto.FLOAT)
                node.input[place] = widened[name]
        edit.nodes.append(node)
        if node.op_type == "Gather" and node.input[0].removesuffix(narrow.suffix) in halved:
            taken, node.output[0] = node.output[0], f"{node.output[0]}{narrow.suffix}"
            edit.add("Cast", [node.output[0]], [taken], to=TensorProto.FLOAT)
    return edit.done()


def _is_large(tensor: onnx.TensorProto) -> bool:
    """Whether ``tensor`` is a weight of the store that a product or a lookup gains by having smaller."""
    external = tensor.data_location == TensorProto.EXTERNAL and tensor.data_type == TensorProto.FLOAT
    outputs, inputs = tensor.dims[-2:] if len(tensor.dims) > 1 else (0, 0)
    if tensor.name.endswith(TRANSPOSED):
        outputs, inputs = inputs, outputs
    return external and len(tensor.dims) in (2, 3) and inputs >= LEAST_INPUTS and outputs >= LEAST_OUTPUTS


class _Writing(Edit):
    """The graph as it gets its types; ``tables`` are the ones that it reads."""

    def __init__(self, proto: onnx.ModelProto, tables: Mapping[str, np.ndarray], narrow: _Narrow) -> None:
        super().__init__(proto)
        self.narrow = narrow
        self._graph = FloatGraph(proto)
        self._given = tables
        self.tables = {name: table for name, table in tables.items() if name not in self._graph.floats}
        self._narrow_values: set[str] = set()
        self._casts: set[str] = set()

    def lost(self) -> frozenset[str]:
        """The constants that the narrow type has not; weights are known to the scan of ranges alone."""
        held = {name: self._numbers(name) for name in self.initializers if name in self._graph.floats}
        return frozenset(name for name, array in held.items() if array is not None and not self.narrow.has(array))

    def write(self, node: onnx.NodeProto, wide: bool) -> None:
        """Writes ``node``, which computes in float32 (``wide``) or in 16 bits, behind the casts that it needs."""
        graph, written = self._graph, onnx.NodeProto()
        written.CopyFrom(node)
        computes = graph.computes(node)
        for place, name in enumerate(node.input):
            if name in graph.floats:
                written.input[place] = self._read(name, wide if computes else name not in self._narrow_values)
        self.nodes.append(written)
        if wide or not computes:
            return
        for place, name in enumerate(node.output):
            if name in graph.floats:
                self._narrow_values.add(name)
                written.output[place] = self._narrow_name(name)
                if name in graph.outputs:
                    self.add("Cast", [written.output[place]], [name], to=TensorProto.FLOAT)
        if node.op_type == "Cast":
            next(attribute for attribute in written.attribute if attribute.name == "to").i = self.narrow.elem

    def _read(self, name: str, wide: bool) -> str:
        """The value ``name`` in the type that is wanted."""
        if name in self.initializers:
            return self._constant(name, wide)
        if name in self._narrow_values:
            if not wide:
                return self._narrow_name(name)
            return name if name in self._graph.outputs else self._as(name, name + _WIDE_SUFFIX, TensorProto.FLOAT)
        return name if wide else self._as(name, name + self.narrow.suffix, self.narrow.elem)

    def _narrow_name(self, name: str) -> str:
        """The name of a value that is computed in 16 bits: its own, which an output's cast has."""
        return name + self.narrow.suffix if name in self._graph.outputs else name

    def _as(self, name: str, cast: str, elem: int) -> str:
        if cast not in self._casts:
            self._casts.add(cast)
            self.add("Cast", [name], [cast], to=elem)
        return cast

    def _constant(self, name: str, wide: bool) -> str:
        numbers = self._numbers(name)
        if wide:
            if name in self._given:
                self.tables[name] = self._given[name]
            return name
        if numbers is None:
            return self.encoded(name, self.narrow.suffix, self.narrow.elem, self.initializers[name].dims)
        converted = numbers.astype(self.narrow.dtype)
        if name in self._given:
            table = table_name(converted)
            self.tables[table] = converted
            return self.encoded(table, "", self.narrow.elem, converted.shape)
        ending = name + self.narrow.suffix
        if ending not in self.initializers:
            self.initializers[ending] = numpy_helper.from_array(converted, ending)
        return ending

    def _numbers(self, name: str) -> np.ndarray | None:
        """The numbers of a constant; None of a weight, which lies in the store."""
        if name in self._given:
            return self._given[name]
        tensor = self.initializers[name]
        return None if tensor.data_location == TensorProto.EXTERNAL else numpy_helper.to_array(tensor)
