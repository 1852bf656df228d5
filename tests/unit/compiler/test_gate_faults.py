"""The gate on whole engines: right ones pass however much their model amplifies rounding, broken ones never do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.parity.cases import Case
from nestforge.compiler.parity.reference import replayed
from nestforge.exporters.universal import UniversalModel
from support.gate_faults import FAULTS, Subject, findings, subject, subjects
from support.tiny_compile import BUCKET, save_tiniest


@pytest.mark.parametrize("name", ["bert, gains x3", "electra, unit embeddings", "cost-eff, heads x1000"])
def test_a_model_that_amplifies_rounding_passes_and_every_fault_of_it_is_found(name: str, tmp_path: Path) -> None:
    every = subjects(tmp_path, [name])
    _, one = next(every)  # whose folder is there as long as ``every`` waits
    found = findings(one)
    assert found["none"].new == "passes"
    assert {fault: found[fault].new for fault in FAULTS} == dict.fromkeys(FAULTS, "refused")


def test_what_float32_cannot_compute_is_refused_by_name(tmp_path: Path) -> None:
    """Embeddings so far from 0 that what their norm leaves of them is below their last digit."""

    def move_away(universal: UniversalModel) -> None:
        universal.parameters()["embeddings.position_embeddings.weight"].data += 1e6

    one = subject(tmp_path, save_tiniest(tmp_path / "bert"), BUCKET, move_away)
    judgement = one.judged(one.outputs())
    assert judgement.unprovable
    assert judgement.broken is not None
    assert "this model needs more than float32" in judgement.broken.describe()


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
