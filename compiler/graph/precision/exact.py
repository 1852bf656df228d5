"""An integer engine without the rounding of its activations: what is left must equal PyTorch as float32 does.

Rounding activations moves an answer by more than most faults would, so that no comparison of the engine itself can tell
a dropped bias from it. This graph reads the same integer weights and has every other node of the engine; given the
numbers that those integers stand for, a PyTorch module computes the same to the last bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import onnx
import torch

from ....elastic import Submodel
from ....exporters.universal import PREFIX, UniversalModel
from ....profiles.precision import FP32, INT4, INT8
from ..encodings import decoded, parts_of, split_encoding
from ..passes.linear_to_gemm import TRANSPOSED
from .edit import Edit

_QUANTISE = frozenset({"QuantizeLinear", "DequantizeLinear"})
# What a row of zeros is divided by here, where nothing is rounded to integers behind it.
_LEAST_UNIT = np.array(1e-30, np.float32)


def exact(graph: bytes) -> bytes:
    """The emitted integer engine ``graph`` with its products in float32, over the same bytes of the store."""
    edit = Edit(onnx.ModelProto.FromString(graph))
    producers = {name: node for node in edit.source for name in node.output}

    def before(name: str) -> str:
        """The value that ``name`` was rounded from."""
        node = producers.get(name)
        while node is not None and node.op_type in _QUANTISE and node.input[0] in producers:
            name, node = node.input[0], producers.get(node.input[0])
        return node.input[0] if node is not None and node.op_type == "QuantizeLinear" else name

    for node in edit.source:
        if node.op_type == "QGemm":
            (trans_b,) = (attribute.i for attribute in node.attribute if attribute.name == "transB")
            weight = edit.add("DequantizeLinear", [*node.input[3:6]], axis=0 if trans_b else 1)
            edit.add("Gemm", [before(node.input[0]), weight], node.output, transB=trans_b)
            continue
        if node.op_type == "MatMulIntegerToFloat":
            weight = edit.add("DequantizeLinear", [node.input[1], node.input[3], node.input[5]], axis=1)
            edit.add("MatMul", [before(node.input[0]), weight], node.output)
            continue
        if node.op_type == "ReduceMax" and (size := producers.get(node.input[0])) and size.op_type == "Abs":
            largest = edit.add("ReduceMax", node.input)
            edit.add("Max", [largest, edit.constant(_LEAST_UNIT)], node.output)
            continue
        for attribute in node.attribute:
            if node.op_type == "MatMulNBits" and attribute.name == "accuracy_level":
                attribute.i = 0  # products of float32
        if node.op_type == "Gemm":
            node.input[0] = before(node.input[0])
        edit.nodes.append(node)
    raw: bytes = edit.done().SerializeToString(deterministic=True)
    return raw


@dataclass(frozen=True)
class StoredModel:
    """``universal`` with the numbers that an engine reads as its parameters, and ``folded`` with the ones that it reads
    as tensors made of several: those lie in the store as they are, or as integers of their own."""

    universal: UniversalModel
    folded: Mapping[str, torch.Tensor]

    def narrow(self, submodel: Submodel, variants: Mapping[str, str]) -> torch.nn.Module:
        """The module narrowed to ``submodel``; where the engine reads folded tensors, in its ``variants``, on those."""
        module, source = self.universal.narrow(submodel), self.universal.source
        if not self.folded:
            return module
        assert source.architecture.lower is not None
        lowered = source.architecture.lower(module, variants)
        parameters = {name.removeprefix(PREFIX): parameter for name, parameter in lowered.named_parameters()}
        for name, tensor in self.folded.items():
            for cut in source.spec.slices_of(name):
                tensor = tensor.narrow(cut.dim, 0, submodel[cut.axis] * cut.unit)
            parameters[name].data = tensor.contiguous()
        return lowered


def with_stored_weights(model: UniversalModel, names: Collection[str]) -> StoredModel:
    """``model`` with the numbers that the tensors ``names`` of the store stand for; integers differ from its own."""
    stored, values = model.stored(), dict[str, torch.Tensor]()
    for name in chain.from_iterable(map(parts_of, names)):
        plain, encoding = split_encoding(name)
        tensor, transposed = plain.removesuffix(TRANSPOSED), plain.endswith(TRANSPOSED)
        if encoding in (INT8, INT4):
            data = stored(tensor).numpy()
            array = decoded(data.T if transposed else data, name)
            values[tensor] = torch.from_numpy(np.ascontiguousarray(array.T if transposed else array))
        elif encoding == FP32 and tensor in model.spec.folded:
            values.setdefault(tensor, stored(tensor))
    folded = {name: values.pop(name) for name in values.keys() & model.spec.folded.keys()}
    return StoredModel(model.with_parameters(values), folded)
