"""onnxscript's optimiser, without the rule that searches the whole graph at every node.

The sequence is that of ``onnxscript.optimizer.optimize_ir``, which takes no rules: constants folded and rewritten until
nothing changes, twice at most, then equal things merged. slices_to_split.py stands for the rule that is left out.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript import rewriter
from onnxscript.optimizer import fold_constants

from .slices_to_split import slices_to_split

_MAX_ROUNDS = 2
_REWRITE_RULES = rewriter.RewritePass(
    [rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule.name != "SlicesSplit"]  # no public list of them
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
