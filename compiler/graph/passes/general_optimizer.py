"""onnxscript's optimiser, what keeps weights out of its reach, and what tidies a graph.

An optimiser may fold an initializer, rename it, or merge two that hold equal values. A weight must keep its name and
stay one tensor, since two biases that are both zero shrink with different axes: so weights are inputs of the graph
while general passes run.
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript import rewriter
from onnxscript.optimizer import fold_constants
from onnxscript.rewriter import pattern
from onnxscript.rewriter.rules import common as rules

from .contract import MAX_FOLDED_ELEMENTS
from .matching import scalar

_MAX_ROUNDS = 2


def _without(operator: str, neutral: int) -> rewriter.RewriteRule:
    """Drops ``operator`` where its constant is ``neutral``, to the last bit: onnxscript's own rules take an epsilon of
    1e-8 for 0 and 1.00001 for 1."""
    exactly = pattern.Constant(neutral, rel_tol=0.0, abs_tol=0.0)
    return rewriter.RewriteRule(lambda op, x: getattr(op, operator)(x, exactly), lambda op, x: op.Identity(x))


# The rules of ``onnxscript.optimizer.optimize_ir`` by the operator that each rewrites, in its order; but for the one
# that makes a Split of two Slices, which searches the whole graph at every node (``slices_to_split``).
_RULES: Mapping[str, Sequence[rewriter.RewriteRule]] = {
    "Mul": _without("Mul", 1).commute(),
    "Add": _without("Add", 0).commute(),
    "Sub": [_without("Sub", 0)],
    "Div": [_without("Div", 1)],
    "Dropout": [rules.dropout_zero_rule, rules.dropout_inference_rule],
    "Reshape": [
        *(rules.two_reshapes_matmul_reshape_rule, rules.one_reshape_matmul_reshape_rule),
        *(rules.materialize_reshape_shape_rule, rules.reshape_reshape_rule, rules.squeeze_reshape_1d_rule),
    ],
    "Cast": [
        *(rules.cast_constant_of_shape_rule, rules.cast_constant_of_shape_without_value_rule),
        *(rules.cast_cast_rule, rules.no_op_cast_rule),
    ],
    "Slice": [rules.collapse_slice_rule, rules.collapse_slice2_rule],
    "Min": [rules.min_min_rule, rules.max_min_rule],
    "Max": [rules.max_max_rule, rules.min_max_rule],
    "Clip": [rules.successive_clip_relu_rule, rules.successive_clip_rule],
    "Relu": [rules.successive_relu_clip_rule, rules.successive_relu_rule],
    "Expand": [rules.no_op_expand_rule],
    "Flatten": [rules.flatten_to_reshape_rule],
    "Transpose": [rules.no_op_transpose_rule, rules.transpose_transpose_rule],
    "Unsqueeze": [rules.unsqueeze_unsqueeze_rule],
    "ScatterND": [rules.no_op_dynamic_scatter_nd_rule, rules.no_op_static_scatter_nd_rule],
    "Conv": [
        *(rules.normalize_pad_format_conv_rule, rules.fuse_pad_into_conv_rule),
        rules.remove_optional_bias_from_conv_rule,
    ],
    "ConvInteger": [rules.normalize_pad_format_conv_integer_rule, rules.fuse_pad_into_conv_integer_rule],
    "ConvTranspose": [rules.remove_optional_bias_from_conv_transpose_rule],
    "QLinearConv": [rules.remove_optional_bias_from_qlinear_conv_rule],
    "BatchNormalization": [
        *(rules.fuse_batchnorm_into_conv_rule, rules.fuse_batchnorm_into_conv_transpose_rule),
        rules.fuse_batchnorm_into_gemm_rule,
    ],
    "Gemm": [rules.remove_optional_bias_from_gemm_rule],
}


def _at(operator: str, rule: rewriter.RewriteRule) -> rewriter.RewriteRule:
    """``rule``, tried at nodes of ``operator`` alone: to learn that 40 rules do not match at each node took two fifths
    of the time of a template."""
    same: Any = copy.copy(rule)

    def try_at_operator(model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        return rule.try_rewrite(model, graph, node, **options) if node.op_type == operator else None

    same.try_rewrite = try_at_operator
    return cast(rewriter.RewriteRule, same)


_REWRITE = rewriter.RewritePass([_at(operator, rule) for operator, some in _RULES.items() for rule in some])
_LIFT_CONSTANTS = common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)
_FOLD_FIRST = ir.passes.Sequential(_LIFT_CONSTANTS, common.RemoveUnusedNodesPass())
_REMOVE_UNUSED = ir.passes.Sequential(common.RemoveUnusedNodesPass(), common.RemoveUnusedOpsetsPass())
_MERGE_DUPLICATES = ir.passes.Sequential(
    common.RemoveUnusedNodesPass(),
    _LIFT_CONSTANTS,
    common.LiftSubgraphInitializersToMainGraphPass(),
    common.DeduplicateInitializersPass(),
    common.CommonSubexpressionEliminationPass(),
    common.OutputFixPass(),
    common.NameFixPass(),
)
_TIDY = ir.passes.Sequential(
    _LIFT_CONSTANTS,
    common.DeduplicateInitializersPass(),
    common.CommonSubexpressionEliminationPass(),
    _REMOVE_UNUSED,
    common.NameFixPass(),
    common.ClearMetadataAndDocStringPass(),
)


def optimize(model: ir.Model, weights: Collection[str] = ()) -> bool:
    """Folds constants of at most ``MAX_FOLDED_ELEMENTS`` and rewrites what a simpler operator computes too, until
    nothing changes, twice at most; then merges equal things."""
    with weights_as_inputs(model, weights):
        folded = fold_constants(model, output_size_limit=MAX_FOLDED_ELEMENTS)  # first: fewer nodes are rewritten
        changed = [folded.modified, _FOLD_FIRST(model).modified, common.InlinePass()(model).modified]
        for _ in range(_MAX_ROUNDS):
            folded = fold_constants(model, onnx_shape_inference=True, output_size_limit=MAX_FOLDED_ELEMENTS)
            split, rewritten = slices_to_split(model), _REWRITE(model)
            changed.append(folded.modified | split | rewritten.modified | _REMOVE_UNUSED(model).modified)
            if not changed[-1]:
                break
        changed.append(_MERGE_DUPLICATES(model).modified)
    return any(changed)


def tidy(model: ir.Model, weights: Collection[str] = ()) -> bool:
    """Removes what nothing reads, merges duplicates and clears metadata."""
    with weights_as_inputs(model, weights):
        return _TIDY(model).modified


@contextmanager
def weights_as_inputs(model: ir.Model, names: Collection[str]) -> Iterator[None]:
    """Within the block the initializers ``names`` are graph inputs; afterwards those still used are initializers."""
    graph = model.graph
    held = [(value, value.const_value) for name, value in graph.initializers.items() if name in names]
    for value, _ in held:
        del graph.initializers[value.name or ""]
        value.const_value = None
        graph.inputs.append(value)
    try:
        yield
    finally:
        for value, tensor in held:
            graph.inputs.remove(value)
            if value.uses():
                value.const_value = tensor
                graph.register_initializer(value)


def slices_to_split(model: ir.Model) -> bool:
    """One Split in place of two Slices that take the halves of a tensor's last dimension, as rotary positions turn each
    head. Slices left unused stay for dead-code removal."""
    changed = False
    for node in list(model.graph):
        if not _is_half(node, 0):
            continue
        source = node.inputs[0]
        assert source is not None
        second = next((use.node for use in source.uses() if use.idx == 0 and _is_half(use.node, 1)), None)
        if second is not None:
            _split(model.graph, source, (node, second))
            changed = True
    return changed


def _is_half(node: ir.Node, which: int) -> bool:
    """Whether ``node`` takes the first (0) or the second (1) half of the last dimension."""
    if node.op_type != "Slice" or len(node.inputs) != 4 or node.outputs[0].is_graph_output():
        return False
    source = node.inputs[0]
    begin, end, axis = (scalar(value) for value in node.inputs[1:])
    if source is None or source.shape is None or begin is None or end is None:
        return False
    rank, extent = len(source.shape), source.shape[-1]
    if axis not in (-1, rank - 1) or not isinstance(extent, int) or extent % 2:
        return False
    half = extent // 2
    return (begin, end) == (0, half) if which == 0 else begin == half and end >= extent


def _split(graph: ir.Graph, source: ir.Value, halves: tuple[ir.Node, ir.Node]) -> None:
    """Behind what makes ``source``, since either of the two Slices may come first in the graph."""
    split = ir.node("Split", [source], attributes={"axis": -1, "num_outputs": 2}, num_outputs=2)
    if (producer := source.producer()) is not None:
        producer.append(split)
    else:
        graph.insert_before(next(iter(graph)), split)
    for old, new in zip(halves, split.outputs, strict=True):
        value = old.outputs[0]
        new.name, new.shape, new.type = value.name, value.shape, value.type
        ir.convenience.replace_all_uses_with(value, new)
        value.name = f"{value.name}_sliced"


def shorten_names(model: ir.Model, keep: Collection[str]) -> bool:
    """Gives values that nobody asks for by name short ones, in the order of the graph: a bundle has a graph for each
    submodel, and names were a third of it. Inputs, outputs and the initializers in ``keep`` have their names, nodes
    have none."""
    graph = model.graph
    fixed = {id(value) for value in (*graph.inputs, *graph.outputs)}
    fixed |= {id(value) for name, value in graph.initializers.items() if name in keep}
    taken = {*keep, *(value.name for value in (*graph.inputs, *graph.outputs))}
    fresh = (name for name in (f"v{number}" for number in count()) if name not in taken)
    values = [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    renamed = [value for value in values if id(value) not in fixed]
    before = [value.name for value in renamed], [node.name for node in graph]
    for number, value in enumerate(renamed):  # out of the way first: an old name may be another's new one
        value.name = f"\0{number}"
    for value in renamed:
        value.name = next(fresh)
    for node in graph:
        node.name = None
    return before != ([value.name for value in renamed], [node.name for node in graph])
