"""onnxscript's optimiser, without the rule that searches the whole graph at every node, and with every other rule tried
only at nodes of the operator that it rewrites.

The sequence is that of ``onnxscript.optimizer.optimize_ir``, which takes no rules: constants folded and rewritten until
nothing changes, twice at most, then equal things merged. slices_to_split.py stands for the rule that is left out.
"""

from __future__ import annotations

import copy
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript import rewriter
from onnxscript.optimizer import fold_constants

from .slices_to_split import slices_to_split

_MAX_ROUNDS = 2


def _at_its_operator(rule: Any) -> Any:
    """``rule``, which matches nowhere else, without asking its matcher at nodes of other operators: to learn from it
    that 40 rules do not match at each node took two fifths of the time of a template."""
    operator = rule._target_pattern.output_nodes[0].op_identifier()  # None where several match
    if operator is None:
        return rule
    _, op_type, _ = operator
    same, try_rewrite = copy.copy(rule), rule.try_rewrite

    def try_at_operator(model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        return try_rewrite(model, graph, node, **options) if node.op_type == op_type else None

    same.try_rewrite = try_at_operator
    return same


_REWRITE_RULES = rewriter.RewritePass(
    # no public list of them
    [_at_its_operator(rule) for rule in rewriter._DEFAULT_REWRITE_RULES if rule.name != "SlicesSplit"]
)
_REMOVE_UNUSED = ir.passes.Sequential(common.RemoveUnusedNodesPass(), common.RemoveUnusedOpsetsPass())
_MERGE_DUPLICATES = ir.passes.Sequential(
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    common.LiftSubgraphInitializersToMainGraphPass(),
    common.DeduplicateInitializersPass(),
    common.CommonSubexpressionEliminationPass(),
    common.OutputFixPass(),
    common.NameFixPass(),
)


def optimize(model: ir.Model, largest: int) -> None:
    """Optimises in place; constants of more than ``largest`` elements are not folded."""
    common.InlinePass()(model)
    for _ in range(_MAX_ROUNDS):
        folded = fold_constants(model, onnx_shape_inference=True, output_size_limit=largest)
        split = slices_to_split(model)
        rewritten = _REWRITE_RULES(model)
        removed = _REMOVE_UNUSED(model)
        if not (folded.modified or split or rewritten.modified or removed.modified):
            break
    common.RemoveUnusedNodesPass()(model)
    _MERGE_DUPLICATES(model)
