"""Trace once, slice many: a template graph, and the emission of any submodel from it in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from onnxscript.optimizer import optimize_ir

from ..elastic import Bucket, ElasticSpec, Submodel
from ..errors import SliceError
from ..exporters.trace import Interface, Trace, trace
from ..exporters.universal import UniversalModel
from ..runtime.manifest import WEIGHTS_NAME
from .passes.drop_open_masks import drop_open_masks
from .passes.free_elastic_dims import Dim, Elastic, free_elastic_dims
from .passes.linear_to_gemm import linear_to_gemm
from .passes.merge_reshapes import merge_reshapes
from .passes.shorten_names import shorten_names
from .passes.simplify_attention import simplify_attention
from .passes.weights_as_inputs import weights_as_inputs
from .store import Store, stored_name, transposed_parameters, unshared_parameters

_FACTS = "nestforge.template"
# Elements. Larger tables, such as a causal mask, stay computed from their size: every engine would hold its own copy,
# and a backend folds them when it loads one.
_FOLDED = 64


@dataclass(frozen=True)
class Template:
    """The ONNX graph of a universal model, or of a segment of it, at one bucket; weights named but not held.

    ``slice_problem`` says why submodels cannot be emitted from it, or is None. ``module_outputs`` maps a module of the
    PyTorch model to the value it returns, for those that survived the passes.
    """

    bucket: Bucket
    proto: onnx.ModelProto
    module_outputs: dict[str, str]
    slice_problem: str | None

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """Names of the initializers that live in the weight store."""
        return tuple(t.name for t in self.proto.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)

    @cached_property
    def private_bytes(self) -> int:
        """Bytes of constants that every engine keeps for itself."""
        tensors = self.proto.graph.initializer
        return sum(len(t.raw_data) for t in tensors if t.data_location != onnx.TensorProto.EXTERNAL)


def make_template(traced: Trace, spec: ElasticSpec, bucket: Bucket, parameters: Collection[str]) -> Template:
    """Turns a trace into a template: constants folded, layers canonical, elastic dimensions free, weights external."""
    model = traced.model
    with weights_as_inputs(model, parameters):
        optimize_ir(model, output_size_limit=_FOLDED)  # shape arithmetic is folded, tables are not
    linear_to_gemm(model, transposed_parameters(spec))  # the layout that makes a slice a prefix
    returned = _returned_values(model, traced.module_outputs)
    drop_open_masks(model)  # what is added to scores hides something
    simplify_attention(model)  # no detours around queries, keys and probabilities
    merge_reshapes(model)  # layers meet without detours
    problem = None
    try:
        free_elastic_dims(model, _seeds(spec))  # a submodel differs in extents alone
    except SliceError as failure:
        problem = str(failure)
    with weights_as_inputs(model, {*parameters, *(stored_name(name, spec) for name in parameters)}):
        _tidy(model)  # unused nodes out, duplicates merged, no traces of this machine in metadata
    shorten_names(model, {stored_name(name, spec) for name in parameters})  # engines are many, names in none of them
    left = {value: value.name or "" for node in model.graph for value in node.outputs}
    kept = {module: left[value] for module, value in returned.items() if value in left}
    shareable = {stored_name(name, spec) for name in parameters} - unshared_parameters(spec)
    return Template(bucket, _without_weights(model, shareable), kept, problem)


def traced_template(
    model: UniversalModel, module: torch.nn.Module, interface: Interface, bucket: Bucket, opset: int
) -> Template:
    """Traces ``module`` (the universal model's, one narrowed from it, or a segment) and makes a template of it."""
    traced = trace(module, interface, bucket, opset)
    return make_template(traced, model.spec, bucket, set(model.parameters()))


def save_template(template: Template, path: Path) -> None:
    """Writes a template as an ONNX file with its own facts as metadata."""
    proto = onnx.ModelProto()
    proto.CopyFrom(template.proto)
    facts = {"bucket": template.bucket.label, "modules": template.module_outputs, "problem": template.slice_problem}
    proto.metadata_props.add(key=_FACTS, value=json.dumps(facts, sort_keys=True))
    path.write_bytes(proto.SerializeToString(deterministic=True))


def load_template(path: Path) -> Template:
    """Reads what ``save_template`` wrote."""
    proto = onnx.ModelProto.FromString(path.read_bytes())
    facts = json.loads(proto.metadata_props[0].value)
    del proto.metadata_props[:]
    return Template(Bucket.parse(facts["bucket"]), proto, facts["modules"], facts["problem"])


def emit(template: Template, store: Store, submodel: Submodel) -> bytes:
    """The ONNX file of ``submodel``: the template with its initializers bound to views of the weight store."""
    model = onnx.ModelProto()
    model.CopyFrom(template.proto)
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            stored = store[tensor.name]
            tensor.dims[:] = stored.view_shape(submodel)
            place = {"location": WEIGHTS_NAME, "offset": str(stored.offset), "length": str(stored.length(submodel))}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=value)
    raw: bytes = model.SerializeToString(deterministic=True)
    return raw


def weight_bytes(template: Template, store: Store, submodel: Submodel) -> int:
    """Bytes of the weight store that the engine of ``submodel`` reads."""
    return sum(store[name].length(submodel) for name in template.weights)


def _returned_values(model: ir.Model, module_outputs: Mapping[str, str]) -> dict[str, ir.Value]:
    """Per module the value with its numbers, before any Reshape: later passes move and remove those."""
    values = {value.name: value for node in model.graph for value in node.outputs}
    returned = {module: values[name] for module, name in module_outputs.items() if name in values}
    for module, value in returned.items():
        while (producer := value.producer()) and producer.op_type == "Reshape" and producer.inputs[0]:
            value = producer.inputs[0]
        returned[module] = value
    return returned


def _seeds(spec: ElasticSpec) -> dict[str, Dim]:
    """Dimension 0 of every elastic weight, as factors."""
    unshared = unshared_parameters(spec)
    if unshared:
        raise SliceError(f"parameter {sorted(unshared)[0]} is sliced in two dimensions, so no prefix view exists")
    axes = {axis.name: axis for axis in spec.axes}
    return {
        stored_name(cut.parameter, spec): (Elastic(axes[cut.axis]), *((cut.unit,) if cut.unit != 1 else ()))
        for cut in spec.slices
    }


def _tidy(model: ir.Model) -> None:
    ir.passes.Sequential(
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedOpsetsPass(),
        common.NameFixPass(),
        common.ClearMetadataAndDocStringPass(),
    )(model)


def _without_weights(model: ir.Model, weights: Collection[str]) -> onnx.ModelProto:
    """Serializes the graph with each weight as an external tensor that has no place yet.

    Intermediate shapes are left out: they are the universal model's, and a submodel's follow from its weights.
    """
    for name in weights:
        value = model.graph.initializers.get(name)
        if value is not None and value.const_value is not None:
            tensor = value.const_value
            value.const_value = ir.ExternalTensor(
                WEIGHTS_NAME, None, None, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name, base_dir=""
            )
    model.producer_name, model.producer_version = "nestforge", None
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]
    for tensor in proto.graph.initializer:
        tensor.ClearField("external_data")
    return proto
