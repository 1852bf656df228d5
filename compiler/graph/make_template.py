"""A traced graph to a template: constants folded, layers canonical, elastic dimensions free, weights external."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import numpy as np
import onnx
import onnx_ir as ir
import torch

from ...bucket import Bucket
from ...bundle.entries.generation_entry import POSITIONS
from ...bundle.files import WEIGHTS_NAME
from ...elastic import ElasticSpec
from ...errors import SliceError
from ...exporters.signature import Interface
from ...exporters.trace import Trace, trace
from ...exporters.universal import UniversalModel
from .encodings import table_name
from .passes.contract import (
    Given,
    Pass,
    constants_are_initializers,
    extents_are_known,
    is_large,
    is_table,
    linear_layers_are_gemm,
    nothing_is_unread,
    reshapes_are_merged,
    tables_are_named,
)
from .passes.dims_by_operator import Dim, Elastic
from .passes.fold_tables import drop_open_masks, fold_tables
from .passes.free_elastic_dims import followed, free_elastic_dims, head_axes
from .passes.fuse_nodes import fuse_norms, join_products, pack_attention
from .passes.fuse_rotary import fuse_rotary, fuse_rotary_into_attention
from .passes.general_optimizer import optimize, shorten_names, tidy, weights_as_inputs
from .passes.linear_to_gemm import linear_to_gemm, rows_as_weights
from .passes.matching import constant
from .passes.merge_reshapes import flatten_rows, merge_reshapes
from .passes.operators import CACHED_ATTENTION
from .passes.take_parts import pick_tokens, take_parts
from .store import joinable_parameters, stored_name, transposed_parameters, unshared_parameters
from .template import Template, require_held

# Keys of what passes note of a value, and of the graph.
_MODULES, _HEADS, _PROBLEM = "modules", "heads", "slice problem"


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
    """Turns a trace into a template, by the passes of ``PASSES``.

    Where it ``fuses``, a KV-cache engine has operators of ONNX Runtime's own, and one product where several of the
    ``joinable`` parameters read one value; ``elastic`` as of ``Part``. The input of positions, where there is one, has
    so many of them.
    """
    model, axes, unshared = traced.model, {axis.name: axis for axis in spec.axes}, unshared_parameters(spec)
    if unshared:
        model.meta[_PROBLEM] = f"parameter {min(unshared)} is sliced in two dimensions, so no prefix view exists"
    given = Given(
        parameters=parameters,
        transposed=transposed_parameters(spec),
        joinable=joinable,
        seeds={} if unshared else _seeds(spec),
        interface={name: {dim: axes[axis] for dim, axis in dims.items()} for name, dims in elastic.items()},
        module_outputs=traced.module_outputs,
        positions=positions,
    )
    for step in passes_for(model, fuses):
        step.run(model, given)
    tables = {name: _numbers(value) for name, value in model.graph.initializers.items() if is_table(name)}
    values = [value for node in model.graph for value in node.outputs]
    returned = {module: value.name or "" for value in values for module in value.meta.get(_MODULES, ())}
    return Template(
        bucket,
        _without_weights(model, given, unshared),
        {module: returned[module] for module in traced.module_outputs if module in returned},
        model.meta.get(_PROBLEM),
        tables,
        heads={value.name or "": value.meta[_HEADS] for value in values if _HEADS in value.meta},
        dims=elastic,
    )


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
    names = model.stored_shapes()
    template = make_template(traced, model.spec, bucket, names, fuses, elastic, joinable, positions)
    # Rules of onnxscript keep the last graph that they matched, which counts what was an input: a tied weight was one.
    vars(traced.model.graph.inputs)["_ref_counter"].clear()
    return template


def passes_for(model: ir.Model, fuses: bool) -> tuple[Pass, ...]:
    """The passes of a traced ``model``: one that reads a cache, by an operator that ONNX Runtime alone has, may have
    others of its own."""
    cached = any(node.op_type == CACHED_ATTENTION for node in model.graph)
    kinds = {"all", *(["cached"] if cached else []), *(["fused"] if cached and fuses else [])}
    return tuple(step for step in PASSES if step.graphs in kinds)


def _note_modules(model: ir.Model, given: Given) -> bool:
    """Notes which value has the numbers of each module, before any Reshape: later passes move and remove those."""
    values = {value.name: value for node in model.graph for value in node.outputs}
    for module, name in given.module_outputs.items():
        value = values.get(name)
        while value is not None and (maker := value.producer()) and maker.op_type == "Reshape" and maker.inputs[0]:
            value = maker.inputs[0]
        if value is not None:
            value.meta.setdefault(_MODULES, []).append(module)
    return False


def _rotary_into_attention(model: ir.Model, given: Given) -> bool:
    return given.positions is not None and fuse_rotary_into_attention(model, given.positions, given.parameters)


def _free_elastic_dims(model: ir.Model, given: Given) -> bool:
    """Frees the elastic dimensions, and notes the heads of attention over a cache; or notes why that cannot be."""
    if _PROBLEM in model.meta:
        return False
    try:
        for value, axes in head_axes(model, given.seeds, given.interface).items():
            value.meta[_HEADS] = axes
        return free_elastic_dims(model, given.seeds, given.interface)
    except SliceError as failure:
        model.meta[_PROBLEM] = str(failure)
        return False


def _fold_tables(model: ir.Model, given: Given) -> bool:
    """Folds what depends on no input, and removes what only that read."""
    with weights_as_inputs(model, given.weights(model)):
        folded = fold_tables(model)
    return folded and (tidy(model, given.weights(model)) or folded)


def _name_tables(model: ir.Model, given: Given) -> bool:
    """Gives large constants the names of their contents: what is equal is one table."""
    named: dict[str, ir.Value] = {}
    for name, value in list(model.graph.initializers.items()):
        if given.is_stored(name) or not is_large(value):
            continue
        table = table_name(_numbers(value))
        if table in named:
            ir.convenience.replace_all_uses_with(value, named[table])
            del model.graph.initializers[name]
        else:
            named[table] = value
    changed = any(value.name != table for table, value in named.items())
    for table, value in named.items():
        value.name = table
    return changed


def _shorten_names(model: ir.Model, given: Given) -> bool:
    return shorten_names(model, [n for n in model.graph.initializers if given.is_stored(n) or is_table(n)])


def _dims_are_free(model: ir.Model, given: Given) -> str | None:
    """No Reshape repeats an elastic extent, or it is known why."""
    if _PROBLEM in model.meta:
        return None
    _, targets = followed(model, given.seeds, given.interface)
    repeats = (node for node, target in targets.items() if (old := constant(node, 1)) is not None and [*old] != target)
    return next((node.outputs[0].name for node in repeats), None)


# In order, each with what it is for. A pass requires what those before it ensure, and says what of that it needs. One
# that is not idempotent finds its pattern again in nodes that it left unread.
PASSES = (
    # Constants folded, simpler operators where they compute the same.
    Pass(
        "optimize",
        lambda model, given: optimize(model, given.weights(model)),
        ensures=(constants_are_initializers, extents_are_known),
        is_idempotent=False,  # twice the rounds, and fresh names
    ),
    # Linear layers as Gemm, whose slices are prefixes.
    Pass(
        "linear_to_gemm",
        lambda model, given: linear_to_gemm(model, given.transposed),
        requires=(constants_are_initializers, extents_are_known),
        ensures=(linear_layers_are_gemm,),
        is_idempotent=False,
    ),
    # Nodes that take joined values apart read them before.
    Pass("take_parts", lambda model, _: take_parts(model), (extents_are_known,)),
    # The tokens whose logits are requested, by one node.
    Pass("pick_tokens", lambda model, _: pick_tokens(model), (extents_are_known,), (), False, "cached"),
    # Norms with the sums before them, and SiLU, as one node.
    Pass("fuse_norms", lambda model, _: fuse_norms(model), (extents_are_known,), (), False, "fused"),
    # Rotary positions by attention itself, from tables.
    Pass("fuse_rotary_into_attention", _rotary_into_attention, (extents_are_known,), graphs="fused"),
    # Those that are left as one node.
    Pass("fuse_rotary", lambda model, _: fuse_rotary(model), (extents_are_known,), graphs="fused"),
    Pass("note_modules", _note_modules),
    # Attention masks that hide nothing.
    Pass("drop_open_masks", lambda model, _: drop_open_masks(model)),
    # Rows and tokens as one dimension from product to product.
    Pass("flatten_rows", lambda model, _: flatten_rows(model), (linear_layers_are_gemm,), graphs="cached"),
    Pass("merge_reshapes", lambda model, _: merge_reshapes(model), ensures=(reshapes_are_merged,)),
    # Elastic extents in the targets of Reshapes as -1.
    Pass("free_elastic_dims", _free_elastic_dims, (linear_layers_are_gemm,), (_dims_are_free,), is_idempotent=False),
    # A row of stacked weights as an initializer of its own.
    Pass("rows_as_weights", lambda model, given: rows_as_weights(model, given.parameters)),
    # Unused nodes, duplicates, metadata.
    Pass(
        "tidy",
        lambda model, given: tidy(model, given.weights(model)),
        ensures=(constants_are_initializers, nothing_is_unread),
    ),
    Pass("fold_tables", _fold_tables, (constants_are_initializers,), (constants_are_initializers, nothing_is_unread)),
    # Products of one value as one product.
    Pass(
        "join_products",
        lambda model, given: join_products(model, given.joinable),
        (linear_layers_are_gemm,),
        graphs="fused",
    ),
    # The parts of one product that attention reads, as one input.
    Pass("pack_attention", lambda model, _: pack_attention(model), (extents_are_known,), graphs="fused"),
    Pass(
        "tidy_fused",
        lambda model, given: tidy(model, given.weights(model)),
        ensures=(constants_are_initializers, nothing_is_unread),
        graphs="fused",
    ),
    Pass("name_tables", _name_tables, (constants_are_initializers,), (tables_are_named,)),
    # Every engine's file holds the names.
    Pass("shorten_names", _shorten_names, (tables_are_named,)),
)


def _seeds(spec: ElasticSpec) -> dict[str, Dim]:
    """Dimension 0 of every elastic weight, as factors; a graph of one structure has what choices slice at its size."""
    axes = {axis.name: axis for axis in spec.axes}
    return {
        stored_name(cut.parameter, spec): (Elastic(axes[cut.axis]), *((cut.unit,) if cut.unit != 1 else ()))
        for cut in spec.stored_slices
        if axes[cut.axis].choices is None
    }


def _numbers(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return np.ascontiguousarray(value.const_value.numpy())


def _without_weights(model: ir.Model, given: Given, unshared: Collection[str]) -> onnx.ModelProto:
    """Serializes the graph with each weight as an external tensor that has no place yet.

    Intermediate shapes are left out: they are the universal model's, and a submodel's follow from its weights.
    """
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and name not in unshared and (given.is_stored(name) or is_table(name)):
            value.const_value = ir.ExternalTensor(
                WEIGHTS_NAME, None, None, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name, base_dir=""
            )
    held = ((name, value.const_value) for name, value in model.graph.initializers.items())
    require_held(
        {n: tensor.nbytes for n, tensor in held if tensor is not None and not isinstance(tensor, ir.ExternalTensor)},
        "slice such a weight along one of its dimensions alone",
    )
    model.producer_name, model.producer_version = "nestforge", None
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]
    for tensor in proto.graph.initializer:
        tensor.ClearField("external_data")
    return proto
