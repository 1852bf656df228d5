"""Bundles of every published schema still open and answer as they did; they are never rewritten."""

from __future__ import annotations

from pathlib import Path

import nestforge
import numpy as np
import pytest
from nestforge.runtime.manifest import SCHEMA_VERSION
from nestforge.runtime.tables import bundle_facts, submodel_table

GOLDEN = Path(__file__).parents[2] / "golden"
VERSIONS = [1, 2]


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_bundle_answers_as_it_did(version: int) -> None:
    expected = np.load(GOLDEN / f"bundle-v{version}-answers.npz", allow_pickle=False)
    with nestforge.load(GOLDEN / f"bundle-v{version}", check="full") as model:
        assert model.bundle.manifest.schema_version == version
        for name in expected.files:
            asked, output = name.split("/")
            submodel, _, exits = asked.partition(" ")
            way = float(exits) if exits not in ("", "off") else "off"
            answer = model("the quick brown fox jumps over the lazy dog", submodel=submodel, exits=way)
            np.testing.assert_allclose(answer.outputs[output], expected[name], atol=1e-5, rtol=1e-4)


def test_what_a_bundle_says_of_its_exits_and_proofs() -> None:
    bundle = nestforge.open_bundle(GOLDEN / "bundle-v2")
    facts = dict(bundle_facts(bundle.manifest, bundle.build))
    assert facts["exits"] == "after layers 1, 3, 4, 3 classes; entropy <= 0.4, 0.3"
    assert facts["proof of decision"].startswith("4 subjects, ")
    assert "proof of load" in facts
    predicted = {latency.engine: latency.predicted_ms for latency in bundle.build.latencies}
    table = submodel_table(bundle.manifest, bundle.build)
    for row in table.rows:
        assert row[4] == f"{predicted[row[1] + '@b1-s16']:.2f}", "of the whole engine, not of a segment"


def test_every_schema_has_its_golden_bundle() -> None:
    assert list(range(1, SCHEMA_VERSION + 1)) == VERSIONS
    assert sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()) == [f"bundle-v{v}" for v in VERSIONS]
