"""A traced graph to a template: constants folded, layers canonical, elastic dimensions free, weights external."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from onnxscript.optimizer import fold_constants

from ...bucket import Bucket
from ...bundle.entries.generation_entry import POSITIONS
from ...bundle.manifest import WEIGHTS_NAME
from ...elastic import ElasticSpec
from ...errors import SliceError
from ...exporters.trace import Interface, Trace, trace
from ...exporters.universal import UniversalModel
from .encodings import table_name
from .passes.cached.flatten_rows import flatten_rows
from .passes.cached.fuse_norms import fuse_norms
from .passes.cached.fuse_rotary import fuse_rotary
from .passes.cached.head_axes import HeadAxes, head_axes
from .passes.cached.join_products import join_products
from .passes.cached.pack_attention import pack_attention
from .passes.cached.pick_tokens import pick_tokens
from .passes.cached.turn_in_attention import turn_in_attention
from .passes.dims_by_operator import CACHED_ATTENTION, Dim, Elastic
from .passes.drop_open_masks import drop_open_masks
from .passes.fold_tables import fold_tables
from .passes.free_elastic_dims import free_elastic_dims
from .passes.general_optimizer import optimize
from .passes.linear_to_gemm import linear_to_gemm
from .passes.merge_reshapes import merge_reshapes
from .passes.rows_as_weights import rows_as_weights
from .passes.shorten_names import shorten_names
from .passes.simplify_attention import simplify_attention
from .passes.weights_as_inputs import weights_as_inputs
from .store import joinable_parameters, stored_name, transposed_parameters, unshared_parameters
from .template import Template

# Elements. Larger constants, such as a causal mask or the matrices of a transform, are tables: they go to the weight
# store, or every engine would hold its own copy.
_MAX_FOLDED_ELEMENTS = 64
_LIFT_CONSTANTS = common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)


def make_template(
    traced: Trace,
    spec: ElasticSpec,
    bucket: Bucket,
    parameters: Collection[str],
    fuses: bool = True,
    elastic: Mapping[str, Mapping[int, str]] = MappingProxyType({}),
    joinable: Collection[str] = (),
    positions: int | None = None,
) -> Template:
    """Turns a trace into a template: constants folded, layers canonical, elastic dimensions free, weights external.
    Where it ``fuses``, an engine that keeps a cache has operators of ONNX Runtime's own, and one product where several
    of the ``joinable`` parameters read one value; ``elastic`` as of ``Part``. The input of positions, where there is
    one, has so many of them."""
    model = traced.model
    with weights_as_inputs(model, parameters):
        _fold(model)  # fold constants first: the optimiser then sees fewer nodes
        optimize(model, _MAX_FOLDED_ELEMENTS)  # fold shape arithmetic, keep large constants
    linear_to_gemm(model, transposed_parameters(spec))  # linear layers as Gemm, whose slices are prefixes
    keeps_cache = _keeps_cache(model)
    if keeps_cache:
        pick_tokens(model)  # the tokens whose logits are asked for, by one node
    if keeps_cache and fuses:  # a step of one token costs as much by its nodes as by its products
        fuse_norms(model)  # norms with the sums before them, and SiLU, as one node
        if positions is not None:
            turn_in_attention(model, positions, parameters)  # rotary positions by attention itself, from tables
        fuse_rotary(model)  # others as one node
    returned = _returned_values(model, traced.module_outputs)
    drop_open_masks(model)  # remove attention masks that hide nothing
    simplify_attention(model)  # remove the exporter's extra nodes around queries, keys and probabilities
    if keeps_cache:
        flatten_rows(model)  # keep rows and tokens one dimension between products
    merge_reshapes(model)  # merge consecutive Reshapes
    problem, heads = None, dict[ir.Value, HeadAxes]()
    axes = {axis.name: axis for axis in spec.axes}
    interface = {name: {dim: axes[axis] for dim, axis in dims.items()} for name, dims in elastic.items()}
    try:
        if keeps_cache:
            heads = head_axes(model, _seeds(spec), interface)  # note what an emission sets of attention over a cache
        free_elastic_dims(model, _seeds(spec), interface)  # replace elastic extents in Reshape targets by -1
    except SliceError as failure:
        problem = str(failure)
    rows = rows_as_weights(model, parameters)  # make a row of stacked weights an initializer of its own
    stored = {stored_name(name, spec) for name in parameters} | rows
    with weights_as_inputs(model, {*parameters, *stored}):
        _tidy(model)  # remove unused nodes, merge duplicates, clear metadata
        if fold_tables(model):  # fold what depends on no input
            _tidy(model)
    if keeps_cache and fuses:
        joined = join_products(model, joinable)  # products of one value as one product
        stored |= joined.names
        returned = {module: joined.values.get(value, value) for module, value in returned.items()}
        pack_attention(model)  # what attention reads of one product as one input
        with weights_as_inputs(model, stored):
            _tidy(model)
    tables = _named_tables(model, stored)
    shorten_names(model, {*stored, *tables})  # shorten names: every engine file holds them
    left = {value: value.name or "" for node in model.graph for value in node.outputs}
    kept = {module: left[value] for module, value in returned.items() if value in left}
    shareable = stored - unshared_parameters(spec)
    proto = _without_weights(model, {*shareable, *tables})
    of_heads = {left[value]: axes for value, axes in heads.items()}
    return Template(bucket, proto, kept, problem, tables, heads=of_heads, dims=elastic)


def traced_template(
    model: UniversalModel,
    module: torch.nn.Module,
    interface: Interface,
    bucket: Bucket,
    opset: int,
    fuses: bool = True,
    elastic: Mapping[str, Mapping[int, str]] = MappingProxyType({}),
) -> Template:
    """Traces ``module`` (the universal model's, one narrowed from it, or a segment) and makes a template of it."""
    traced = trace(module, interface, bucket, opset)
    positions = next((spec.high for spec in interface.inputs if spec.name == POSITIONS), None)
    joinable = joinable_parameters(model)
    return make_template(traced, model.spec, bucket, model.stored_names(), fuses, elastic, joinable, positions)


def _keeps_cache(model: ir.Model) -> bool:
    """Whether the graph reads a cache, by an operator that ONNX Runtime alone has; so it may have others of its own."""
    return any(node.op_type == CACHED_ATTENTION for node in model.graph)


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
    """Dimension 0 of every elastic weight, as factors; a graph of one structure has what choices slice at its size."""
    unshared = unshared_parameters(spec)
    if unshared:
        raise SliceError(f"parameter {sorted(unshared)[0]} is sliced in two dimensions, so no prefix view exists")
    axes = {axis.name: axis for axis in spec.axes}
    return {
        stored_name(cut.parameter, spec): (Elastic(axes[cut.axis]), *((cut.unit,) if cut.unit != 1 else ()))
        for cut in spec.stored_slices
        if axes[cut.axis].choices is None
    }


def _named_tables(model: ir.Model, weights: Collection[str]) -> dict[str, np.ndarray]:
    """The large constants of a graph, which get the names of their contents: what is equal is one table."""
    named: dict[str, ir.Value] = {}
    tables: dict[str, np.ndarray] = {}
    for name, value in list(model.graph.initializers.items()):
        if name in weights or value.const_value is None or value.const_value.size <= _MAX_FOLDED_ELEMENTS:
            continue
        array = np.ascontiguousarray(value.const_value.numpy())
        table = table_name(array)
        if table in named:
            ir.convenience.replace_all_uses_with(value, named[table])
            del model.graph.initializers[name]
        else:
            named[table], tables[table] = value, array
    for table, value in named.items():
        value.name = table
    return tables


def _fold(model: ir.Model) -> None:
    fold_constants(model, output_size_limit=_MAX_FOLDED_ELEMENTS)
    ir.passes.Sequential(_LIFT_CONSTANTS, common.RemoveUnusedNodesPass())(model)


def _tidy(model: ir.Model) -> None:
    ir.passes.Sequential(
        _LIFT_CONSTANTS,
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
