"""A submodel equals the universal model with what it drops set to zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nestforge.bundle.manifest import Proof
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.parity.prove import prove_slice
from nestforge.elastic import Submodel
from support.tiny_compile import BUCKET


def proofs(builder: EngineBuilder, submodel: str) -> list[Proof]:
    parsed = builder.universal.spec.parse(submodel)
    return list(prove_slice(parsed, BUCKET, builder.references))


@pytest.mark.parametrize("submodel", ["ffn8", "heads1", "ffn8_24-heads1_2"])
def test_narrowing_keeps_what_it_keeps(builder: EngineBuilder, submodel: str) -> None:
    (proof,) = proofs(builder, submodel)
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
    (proof,) = proofs(builder, "ffn8")
    assert proof.worst > proof.limit


def test_the_weights_are_left_as_they_were(builder: EngineBuilder) -> None:
    before = {name: data.clone() for name, data in builder.universal.parameters().items()}
    proofs(builder, "ffn8-heads1")
    assert all(torch.equal(data, before[name]) for name, data in builder.universal.parameters().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-4])
@pytest.mark.parametrize("case", [0, -1], ids=["first case", "last case"])
def test_what_is_no_number_and_what_every_precision_would_allow_break_the_limit(
    builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch, value: float, case: int
) -> None:
    """One bias of the narrowed module, on one case alone."""
    submodel, cases = builder.universal.spec.parse("ffn8"), builder.cases[BUCKET]
    module, passes = builder.references.of(submodel).module, iter(range(len(cases)))

    def add(module: torch.nn.Module, inputs: object, outputs: Any) -> Any:
        first, *rest = outputs
        if first.dtype != torch.float64:
            return None
        return (first + value if next(passes) == case % len(cases) else first, *rest)

    handle = module.register_forward_hook(add)
    try:
        (proof,) = proofs(builder, "ffn8")
    finally:
        handle.remove()
    assert not proof.worst <= proof.limit
    assert proof.limit == 1e-9
