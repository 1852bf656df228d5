"""Which drafts a request may name, and the lines that refuse the others."""

from __future__ import annotations

from typing import Any

import pytest
from nestforge.errors import InputError, NestforgeError, SelectionError
from nestforge.runtime.generation.drafting.drafters import smaller_engines
from nestforge.runtime.model import ElasticModel


@pytest.mark.parametrize(
    ("prompt", "options", "error", "line"),
    [
        (
            [5],
            {"draft": "ffn7"},
            SelectionError,
            "draft: no submodel 'ffn7' in this bundle; it has ffn8 (S), ffn16 (M), ffn24 (L), ffn32 (XL); or n-gram, "
            "or auto",
        ),
        (
            [5],
            {"draft": "XL"},
            SelectionError,
            "draft ffn32: expected a submodel that generates here and is smaller than ffn32, which writes: ffn24, "
            "ffn16, ffn8; or n-gram, or auto",
        ),
        (
            [5],
            {"draft": "L", "submodel": "S"},
            SelectionError,
            "draft ffn24: expected a submodel that generates here and is smaller than ffn8, which writes: there is "
            "none; or n-gram, or auto",
        ),
        ([5], {"draft": 8}, SelectionError, "draft: expected a name, got 8"),
        ([5], {"drafted": 3}, InputError, "drafted 3: by no draft; name one with `draft`"),
        ([5], {"draft": "S", "drafted": 0}, InputError, "drafted: expected a whole number, 1 or above, got 0"),
        (
            [5],
            {"draft": "S", "drafted": 256},
            InputError,
            "drafted: expected at most 255, one less than a run of ffn32.cached@b1_64-s1_256 takes, got 256",
        ),
        (
            [[5], [7]],
            {"draft": "S"},
            InputError,
            "draft: tokens are drafted for one row, got 2 prompts; call once for each",
        ),
        (
            [[5], [7]],
            {"draft": "auto"},
            InputError,
            "draft: tokens are drafted for one row, got 2 prompts; call once for each",
        ),
        (
            [5],
            {"draft": "auto", "temperature": 1.0, "seed": 0},
            InputError,
            "seed: with draft auto what is drafted depends on times, so that no seed repeats a text; name a draft",
        ),
        *(
            (
                [5],
                {"draft": "S", name: 5},
                SelectionError,
                f"generate with draft, {name}: limits may change who writes at every token, a draft is checked by one "
                "submodel; ask for either",
            )
            for name in ("tokens_per_second", "deadline_ms", "memory_mb")
        ),
    ],
)
def test_what_cannot_draft_is_refused(
    model: ElasticModel, prompt: Any, options: dict[str, Any], error: type[NestforgeError], line: str
) -> None:
    with pytest.raises(error) as raised:
        model.generate(prompt, **options)
    assert str(raised.value) == line


def test_a_budget_names_who_checks(model: ElasticModel) -> None:
    budget = next(one for one in model.bundle.manifest.budgets if one.submodel != "ffn8")
    row = model.generate([5, 7], max_tokens=8, budget=budget.name, draft="S").rows[0]
    assert [run.submodel for run in row.runs] == [budget.submodel]
    assert [one.draft for one in row.drafts] == ["ffn8"]


def test_smaller_engines_are_those_that_may_be_open(model: ElasticModel) -> None:
    entry = model.bundle.manifest.generation
    assert entry
    target = next(engine for engine in entry.engines if engine.submodel == "ffn24")
    every = [engine.id for engine in entry.engines]
    found = [engine.submodel for engine in smaller_engines(model.bundle.manifest, target, every)]
    assert found == ["ffn16", "ffn8"]
    admitted = [name for name in every if not name.startswith("ffn16")]
    assert [one.submodel for one in smaller_engines(model.bundle.manifest, target, admitted)] == ["ffn8"]


def test_auto_may_open_the_smallest_and_one_of_half_the_size(model: ElasticModel) -> None:
    model.generate([5, 7], max_tokens=2, draft="auto")
    entry = model.bundle.manifest.generation
    assert entry
    size = {engine.submodel: engine.weight_bytes or 0 for engine in entry.engines}
    half = min(("ffn24", "ffn16", "ffn8"), key=lambda submodel: abs(2 * size[submodel] - size["ffn32"]))
    assert set(model.generate.open_submodels) == {"ffn32", half, "ffn8"}


def test_auto_of_the_smallest_is_the_text_itself(model: ElasticModel) -> None:
    row = model.generate([5, 7, 5, 7, 5], max_tokens=30, draft="auto", submodel="S").rows[0]
    assert model.generate.open_submodels == ("ffn8",)
    assert {one.draft for one in row.drafts} <= {"n-gram"}
