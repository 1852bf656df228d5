from __future__ import annotations

import re

import pytest
from nestforge.bundle.entries.engine_entry import ParityOutput
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.parity.engine_verdict import tolerance_of
from nestforge.compiler.parity.evidence.compare import Comparison
from nestforge.compiler.parity.evidence.replayed import BrokenRoute
from nestforge.compiler.parity.judge import JudgedOutputs, Verdict
from nestforge.compiler.parity.require_parity import ProofRun, require_parity
from nestforge.errors import ParityError
from support.tiny_compile import BUCKET

FIGURES = ParityOutput("y", 0.5, 0.5, 0.9, 0.1, 0.0, 0.0)


def refusal(builder: EngineBuilder, verdict: Verdict) -> str | None:
    """What is said of a sound engine under ``verdict``."""
    whole, cases = builder.universal.spec.universal(), builder.cases[BUCKET]
    engine = builder.emit("one", "one.onnx", whole, BUCKET)
    reference = builder.references.of(whole)
    outputs = JudgedOutputs(builder.draft.manifest.outputs)
    run = ProofRun(engine.proof_graph, engine.template.module_outputs, builder.proofs.path, reference, None, outputs)
    limit = tolerance_of(engine.entry, builder.universal)
    try:
        require_parity("engine one", verdict, run, cases, [{} for _ in cases], limit, "the rule")
    except ParityError as failure:
        return str(failure)
    return None


def test_a_verdict_that_is_not_broken_is_let_through(builder: EngineBuilder) -> None:
    assert refusal(builder, Verdict((FIGURES,), None, None)) is None


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            Comparison(FIGURES, ("random-1",)),
            r"engine one: output y, case random-1: .*; allowed the rule; first to diverge: no module alone breaks the ",
        ),
        (
            BrokenRoute("whole", "routes, case whole: worse"),
            r"engine one: routes, .*; allowed the rule; first to diverge: no module; the route alone is wr",
        ),
        (Comparison(FIGURES, ("random-0",), True), r"engine one: output y, .* no comparison would prove anything$"),
    ],
)
def test_a_broken_one_says_where_it_leaves_pytorch(
    builder: EngineBuilder, broken: Comparison | BrokenRoute, message: str
) -> None:
    found = refusal(builder, Verdict((FIGURES,), None, broken))
    assert found is not None
    assert re.match(message, found), found
