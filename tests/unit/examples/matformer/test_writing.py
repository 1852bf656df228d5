"""How a bundle writes: every level, a rate, drafts; the tables say what was generated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nestforge.examples.matformer.writing import agreement, levels_of, ways_of_writing, ways_table
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.generating import llama_folder

PROMPTS = ("one two", "three")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory) / "bundle"


@pytest.fixture
def model(bundle: Path) -> Iterator[ElasticModel]:
    with load(bundle, threads=1) as opened:
        yield opened


def test_every_way_writes_and_what_was_drafted_is_the_largest_levels_own_text(model: ElasticModel) -> None:
    assert levels_of(model.bundle.manifest) == ["XL", "L", "M", "S"]
    ways = ways_of_writing(model, PROMPTS, tokens=12)
    names = [way.name for way in ways]
    assert names[:4] == ["XL", "L", "M", "S"]
    assert names[4].endswith("tokens a second requested")
    assert names[5:] == [f"XL, drafted by {draft}" for draft in ("S", "M", "L", "n-gram", "auto")]
    own = [model.generate(prompt, max_tokens=12, submodel="XL").text for prompt in PROMPTS]
    for way in (ways[0], *ways[5:]):
        assert list(way.texts) == own
        assert way.shares == {"XL": 1.0}
    assert ways[3].shares == {"S": 1.0}
    assert ways[0].accepted is None
    assert 0.0 <= (ways[5].accepted or 0.0) <= 1.0
    assert all(way.tokens_per_second > 0 for way in ways)
    rows = {row[0]: row for row in ways_table(ways, "XL").rows}
    assert rows["XL"][2:] == ["1.00x", "XL 100%", "-", "yes"]
    assert rows["XL, drafted by S"][-1] == "yes"


def test_a_model_agrees_with_itself(model: ElasticModel) -> None:
    assert agreement(model, model, "XL", PROMPTS) == 1.0
    assert agreement(model, model, "S", PROMPTS) < 1.0
