"""Plans that decide between equals otherwise than their graphs: left out and counted, within bounds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.graph.precision.proof_graphs import with_proof_graphs
from nestforge.compiler.tensorrt.check_plan import check_plan
from nestforge.errors import ParityError
from nestforge.runtime.engines.onnxruntime.runner import OnnxRuntimeRunner
from nestforge.runtime.inputs.arrays import Array

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "bundle-experts"
ENCODER_DECODER = GOLDEN.with_name("bundle-conditional")


class Plan(OnnxRuntimeRunner):
    """The graph itself, but for the cases (by number) whose outputs or routes it gets wrong."""

    def __init__(self, bundle: Bundle, engine: EngineEntry, outputs: set[int], routing: set[int]) -> None:
        super().__init__(bundle, engine, "shared", 1)
        self.wrong, self.case = (outputs, routing), -1

    def run(self, feeds: Mapping[str, Array], routing: bool = False) -> list[Array]:
        found = super().run(feeds, routing)
        self.case += 1
        for wrong, array in zip(self.wrong, (found[0], found[-1]), strict=True):
            array += self.case in wrong
        return found


@pytest.mark.parametrize(
    ("outputs", "routing", "left_out", "runs"),
    [
        (set(), set(), 0, 4),
        (set(), {0, 1, 2, 3}, 0, 4),  # what equal outputs were decided by does not matter
        ({1, 3}, {1, 3}, 2, 6),
        ({0, 1, 2, 3}, {0, 1, 2, 3}, 4, 8),
    ],
)
def test_cases_that_decide_otherwise_make_room(outputs: set[int], routing: set[int], left_out: int, runs: int) -> None:
    bundle = open_bundle(GOLDEN)
    with Plan(bundle, bundle.manifest.engines[0], outputs, routing) as plan:
        parity = check_plan(with_proof_graphs(bundle, bundle.path), plan.engine, plan)
        assert (parity.cases, parity.left_out, plan.case + 1) == (4, left_out, runs)
    assert (parity.max_abs, np.round(parity.min_cosine, 9)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("outputs", "routing", "message"),
    [
        ({2}, set(), r"its plan: output \w+, case seed 2 at [0-9]+x[0-9]+: max abs 1, .*; allowed abs <="),
        ({2}, {0, 1}, r"its plan: output \w+, case seed 2 at [0-9]+x[0-9]+: max abs 1, "),
        (set(range(5)), set(range(5)), "its plan decides otherwise than its graph in 5 of 8 cases, more than equal"),
    ],
)
def test_other_outputs_from_the_same_decisions_are_refused(outputs: set[int], routing: set[int], message: str) -> None:
    bundle = open_bundle(GOLDEN)
    engine = bundle.manifest.engines[0]
    with Plan(bundle, engine, outputs, routing) as plan, pytest.raises(ParityError, match=message) as raised:
        check_plan(with_proof_graphs(bundle, bundle.path), engine, plan)
    assert str(raised.value).startswith(f"engine {engine.id}: ")


class WrongBehind(OnnxRuntimeRunner):
    """The graph, but for logits at places that the encoder's mask leaves out."""

    def run(self, feeds: Mapping[str, Array], routing: bool = False) -> list[Array]:
        found = super().run(feeds, routing)
        found[0] += feeds["attention_mask"][:, :, None] == 0
        return found


def test_an_encoders_mask_leaves_out_no_output_of_the_decoder() -> None:
    bundle = open_bundle(ENCODER_DECODER)
    engine = bundle.manifest.engines[0]
    with WrongBehind(bundle, engine, "shared", 1) as plan, pytest.raises(ParityError, match="output logits, case seed"):
        check_plan(with_proof_graphs(bundle, bundle.path), engine, plan)
