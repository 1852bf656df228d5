"""Which drafts a request may name, and the lines that refuse the others."""

from typing import Any

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.errors import InputError, NestforgeError, SelectionError
from nestforge.runtime.generation.drafting import NgramDraft, SubmodelDraft, look_up, smaller_engines
from nestforge.runtime.generation.row import Row, RowOptions
from nestforge.runtime.generation.sampling import Sampling
from nestforge.runtime.generation.step_times import StepTimes
from nestforge.runtime.generation.text_stream import Stops
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
            "draft ffn32: expected a submodel that generates here and is smaller than ffn32, which checks: ffn24, "
            "ffn16, ffn8; or n-gram, or auto",
        ),
        (
            [5],
            {"draft": "L", "submodel": "S"},
            SelectionError,
            "draft ffn24: expected a submodel that generates here and is smaller than ffn8, which checks: there is "
            "none; or n-gram, or auto",
        ),
        ([5], {"draft": 8}, InputError, "draft: expected str or None, got int 8"),
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
                f"generate with draft, {name}: limits may change the submodel at every token, a draft is checked by "
                "one; ask for either",
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


ENGINE = EngineEntry("large", "large", Bucket(1, 1), "onnxruntime", "large.onnx", "sliced", 0, 0, 0, 0)
MANY = RowOptions(20, Sampling(), Stops(), frozenset())


def test_an_encoders_prompt_is_looked_up_too() -> None:
    prompt = np.array([9, 5, 6, 7, 8, 1])
    row = Row(0, np.array([0, 5, 6]), MANY, None, source=prompt)
    assert [drafted.token for drafted in NgramDraft().propose(row, 3)] == [7, 8, 1]
    assert NgramDraft().can_propose(row)
    assert not NgramDraft().can_propose(Row(0, np.array([0, 5, 6]), MANY, None))


class Overflowed:
    """A session whose drafts are not finite."""

    def draft(self, *_: Any) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return np.full(9, np.nan, np.float32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_overflow_of_a_draft_names_the_draft(temperature: float) -> None:
    row = Row(0, np.array([7, 8]), RowOptions(5, Sampling(temperature), Stops(), frozenset()), None)
    line = r"^draft large: row 0: expected finite logits, the largest is nan: the engine overflowed; generate with"
    with pytest.raises(InputError, match=line):
        SubmodelDraft(ENGINE, Overflowed(), StepTimes()).propose(row, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "count", "found"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 6, [3, 4, 1, 2, 3, 4]),  # what is found reaches into itself
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, [6]),  # the last place of two
        ([9, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], 1, [5]),  # three tokens alike before two
        ([7, 9, 1, 2, 5, 8, 9, 1, 2, 6, 7, 9, 1, 2], 1, [6]),  # beyond three the last place counts
        ([4, 4, 4], 3, [4, 4, 4]),
        ([4, 4], 3, []),  # one token alike
        ([1, 2, 3], 3, []),
        ([3], 3, []),
        ([1, 2, 1, 2], 0, []),
    ],
)
def test_what_followed_the_last_tokens_before(tokens: list[int], count: int, found: list[int]) -> None:
    assert look_up(np.array(tokens), count).tolist() == found
