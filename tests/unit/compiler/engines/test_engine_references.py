"""What engines of integers are held against: the numbers that their integers stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.engines.engine_references import written_references
from nestforge.compiler.graph import store
from nestforge.compiler.parity.cases import few
from nestforge.errors import ParityError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.profiles.precision import INT4
from nestforge.runtime.inputs.arrays import Arrays
from support.rounding import rounded
from support.tiny_compile import BUCKET, board, builder_in, save_tiniest, template_of

NAME = "encoder.layer.1.intermediate.dense.weight"


@pytest.fixture
def in_4_bits(tmp_path: Path) -> EngineBuilder:
    universal = load_universal(open_source(save_tiniest(tmp_path / "model", hidden_size=32, intermediate_size=64)))
    return builder_in(tmp_path / "stage", universal, template_of(universal), board(precision=["int4"]))


def test_an_engine_of_integers_is_held_against_its_own_numbers(in_4_bits: EngineBuilder) -> None:
    whole = in_4_bits.universal.spec.universal()
    entry, references = in_4_bits.build(whole, BUCKET), in_4_bits.engine_references
    own = references.of(in_4_bits.proofs, entry)
    held = own.of(whole).module.get_parameter(f"model.{NAME}").detach().numpy()
    weight = in_4_bits.universal.parameters()[NAME].numpy()
    assert np.array_equal(held, rounded(weight, NAME + INT4))
    assert references.of(in_4_bits.proofs, entry) is own, "made once"
    assert references.of(in_4_bits.proofs, replace(entry, precision="fp32")) is in_4_bits.references
    on_few = references.on(few).of(in_4_bits.proofs, entry)
    assert on_few.replayed(whole, BUCKET).outputs[0] is own.replayed(whole, BUCKET).outputs[0], "nor passed again"
    with written_references(in_4_bits.bundle, in_4_bits.references) as written:
        again = written.of(in_4_bits.bundle, entry).of(whole).module.get_parameter(f"model.{NAME}").detach().numpy()
        assert np.array_equal(again, held)


def test_how_far_rounded_weights_leave_the_model_is_stated_and_not_judged(in_4_bits: EngineBuilder) -> None:
    """Weights of which 4 bits keep little, as a language model's logits on single tokens."""
    with torch.no_grad():
        for name, parameter in in_4_bits.universal.parameters().items():
            if name.endswith("intermediate.dense.weight"):
                parameter[:, 0] *= 60  # the rest of its block is rounded away, and this has hardly an input
            if "attention.output.LayerNorm" in name:
                parameter[0] /= 1e4
    templates = in_4_bits.templates
    store.write_store(in_4_bits.universal, templates.weights(), templates.tables(), in_4_bits.stage.folder)
    whole = in_4_bits.universal.spec.universal()
    receipt = in_4_bits.build(whole, BUCKET).parity
    assert receipt is not None
    assert min(output.min_cosine for output in receipt.outputs) < receipt.min_cosine
    assert "figures are those from the model as it is" in receipt.rule


def test_activations_that_are_rounded_wrongly_are_found(
    in_4_bits: EngineBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the rounding of activations is right, so that the proof without it passes."""
    answers, whole = EngineBuilder.answers, in_4_bits.universal.spec.universal()

    def clipped(found: list[Arrays]) -> list[Arrays]:
        return [{name: np.clip(array, -0.3, 0.3) for name, array in arrays.items()} for arrays in found]

    monkeypatch.setattr(EngineBuilder, "answers", lambda self, *of: clipped(answers(self, *of)))
    with pytest.raises(ParityError, match=r"^engine \S+: output \S+, case \S+: max abs .*no module alone"):
        in_4_bits.build(whole, BUCKET)
