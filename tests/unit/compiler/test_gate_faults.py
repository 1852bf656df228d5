"""The gate on whole engines: right ones pass however much their model amplifies rounding, broken ones never do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from gate_faults import FAULTS, Subject, findings, gains, subject, subjects
from nestforge.compiler.cases import Case
from nestforge.compiler.reference import replayed
from nestforge.elastic import Bucket
from tiny_compile import save_tiniest
from tiny_models import save_tiny_encoder


@pytest.mark.parametrize("name", ["bert, gains x3", "electra, unit embeddings", "cost-eff, heads x1000"])
def test_a_model_that_amplifies_rounding_passes_and_every_fault_of_it_is_found(name: str, tmp_path: Path) -> None:
    ((_, one),) = subjects(tmp_path, [name])
    found = findings(one)
    assert found["none"].new == "passes"
    assert {fault: found[fault].new for fault in FAULTS} == dict.fromkeys(FAULTS, "refused")


def test_what_float32_cannot_compute_is_refused_by_name(tmp_path: Path) -> None:
    """Scores so large that rounding decides which of them wins."""
    model = save_tiny_encoder(tmp_path / "bert", hidden_size=64, num_hidden_layers=6)
    one = subject(tmp_path, model, Bucket(2, 16), gains(12))
    assert one.judged(one.outputs()).unprovable


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
def test_every_mask_that_is_answered_is_answered_as_pytorch_does(decoder: bool, tmp_path: Path) -> None:
    """All masks of two rows of three; a third row fills the bucket, as the runtime does it."""
    model = save_tiniest(tmp_path / "bert", is_decoder=decoder)
    one = subject(tmp_path, model, Bucket(3, 3), None)
    first = one.cases[0].feeds
    lines = [line for line in product((0, 1), repeat=3) if (line[0] if decoder else any(line))]
    cases = []
    for number, pair in enumerate(product(lines, repeat=2)):
        feeds = {name: array.copy() for name, array in first.items()}
        for array in feeds.values():
            array[2] = 0
        feeds["attention_mask"][:2] = pair
        cases.append(Case(f"mask {number}", feeds, 2))
    every = _on(one, cases)
    assert every.judged(every.outputs()).broken is None
    # What fills the bucket reaches nobody.
    alone, other = every.outputs()[0], cases[0].feeds
    for array in other.values():
        array[2] = 1
    for name, array in one.builder.run(one.engine.entry, [other])[0].items():
        assert np.array_equal(array[:2], alone[name][:2]), name


def _on(one: Subject, cases: list[Case]) -> Subject:
    reference = one.builder.references.of(one.builder.universal.spec.universal())
    return replace(one, cases=cases, reference=replayed(reference, cases))
