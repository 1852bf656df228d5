"""Bundles of every published schema still open and answer as they did; they are never rewritten."""

from __future__ import annotations

from pathlib import Path

import nestforge
import numpy as np
import pytest
from nestforge.runtime.manifest import SCHEMA_VERSION

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


def test_every_schema_has_its_golden_bundle() -> None:
    assert list(range(1, SCHEMA_VERSION + 1)) == VERSIONS
    assert sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()) == [f"bundle-v{v}" for v in VERSIONS]
