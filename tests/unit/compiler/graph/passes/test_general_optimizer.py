"""Rules that are tried at nodes of their own operator alone rewrite what they rewrote at all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from nestforge.compiler.graph.passes import general_optimizer
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from onnxscript import rewriter
from support.cost_eff_models import save_tiny
from support.gated_decoders import save_decoder
from support.tiny_compile import save_tiniest, template_of


@pytest.mark.parametrize("save", [save_tiniest, save_decoder, save_tiny])
def test_the_graph_is_that_of_rules_tried_at_every_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: object
) -> None:
    universal = load_universal(open_source(save(tmp_path / "m")))  # type: ignore[operator]
    found = template_of(universal)
    plain = [rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule.name != "SlicesSplit"]
    assert len(plain) == len(general_optimizer._REWRITE_RULES.rules.rules) > 30
    monkeypatch.setattr(general_optimizer, "_REWRITE_RULES", rewriter.RewritePass(plain))
    expected = template_of(universal)
    assert (found.proto, found.module_outputs) == (expected.proto, expected.module_outputs)


def test_a_rule_still_rewrites_at_its_operator() -> None:
    import onnx
    import onnx_ir as ir

    graph = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        agraph (float[2, 3] x) => (float[2, 3] y)
        {
            a = Transpose <perm = [1, 0]> (x)
            b = Transpose <perm = [1, 0]> (a)
            y = Relu (b)
        }"""
    )
    model = ir.from_proto(graph)
    assert general_optimizer._REWRITE_RULES(model).modified
    general_optimizer.optimize(model, 64)
    assert [node.op_type for node in model.graph] == ["Relu"]
