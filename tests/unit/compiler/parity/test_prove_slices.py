"""A submodel equals the universal model with what it drops set to zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nestforge.compiler.build.build_engine import EngineBuilder
from nestforge.compiler.parity.compare import tolerance_for
from nestforge.compiler.parity.prove_slices import prove_slice
from nestforge.elastic import Submodel
from nestforge.runtime.bundle.manifest import Proof
from support.tiny_compile import BUCKET

LIMIT = tolerance_for("fp32", 2)


def proofs(builder: EngineBuilder, submodel: str) -> list[Proof]:
    parsed = builder.universal.spec.parse(submodel)
    return list(prove_slice(builder.universal, parsed, builder.references, builder.cases[BUCKET], LIMIT))


@pytest.mark.parametrize("submodel", ["ffn8", "heads1", "ffn8_24-heads1_2"])
def test_narrowing_keeps_what_it_keeps(builder: EngineBuilder, submodel: str) -> None:
    (proof,) = prove_slice(
        builder.universal, builder.universal.spec.parse(submodel), builder.references, builder.cases[BUCKET], LIMIT
    )
    assert proof.suite == "slice"
    assert 0 <= proof.worst <= proof.limit
    assert proof.checked == len(builder.cases[BUCKET])


def test_the_universal_model_needs_no_proof(builder: EngineBuilder) -> None:
    assert proofs(builder, builder.universal.spec.universal().id) == []


def test_a_narrowing_that_takes_other_steps_is_found(builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last heads instead of the first."""
    narrow = type(builder.universal).narrow

    def wrong(self: Any, submodel: Submodel) -> Any:
        module: Any = narrow(self, submodel)
        if not submodel.is_universal:
            last = self.module.model.encoder.layer[0].intermediate.dense.weight.data[-8:]
            module.model.encoder.layer[0].intermediate.dense.weight = torch.nn.Parameter(last, requires_grad=False)
        return module

    monkeypatch.setattr(type(builder.universal), "narrow", wrong)
    (proof,) = prove_slice(
        builder.universal, builder.universal.spec.parse("ffn8"), builder.references, builder.cases[BUCKET], LIMIT
    )
    assert proof.worst > proof.limit


def test_the_weights_are_left_as_they_were(builder: EngineBuilder) -> None:
    before = {name: data.clone() for name, data in builder.universal.parameters().items()}
    list(
        prove_slice(
            builder.universal,
            builder.universal.spec.parse("ffn8-heads1"),
            builder.references,
            builder.cases[BUCKET],
            LIMIT,
        )
    )
    assert all(torch.equal(data, before[name]) for name, data in builder.universal.parameters().items())
