"""Which drafts a request may name, and which is expected to write fastest."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.device_files.device_file import MeasuredHost, this_host
from nestforge.bundle.entries.engine_entry import Decode, EngineEntry
from nestforge.bundle.manifest import DRAFTS_NAME
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleFormatError, InputError, NestforgeError, SelectionError
from nestforge.runtime.generation.draft_gains import (
    DraftCalibration,
    Gains,
    HostDrafts,
    JudgedDraft,
    RunTime,
    StepTimes,
)
from nestforge.runtime.generation.drafting import NgramDraft, SubmodelDraft, look_up, smaller_engines
from nestforge.runtime.generation.row import Row, RowOptions
from nestforge.runtime.generation.sampling import Sampling
from nestforge.runtime.generation.text_stream import Stops
from nestforge.runtime.load import verify_bytes
from nestforge.runtime.model import ElasticModel
from support.sealing import edit_sealed


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
        SubmodelDraft(ENGINE, Overflowed(), StepTimes()).propose(row, 2)


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


_BUCKET = Bucket(64, 256, 1, 1)
TARGET = EngineEntry(
    "large", "large", _BUCKET, "onnxruntime", "e.onnx", "sliced", 0, 0, 0, 0, Decode(), weight_bytes=40_000_000
)
STEP_MS = 10.0
HOST = MeasuredHost("cpu", "x86_64", 2)


def gains(check_ms: float | None = None, tokens: int = 5) -> Gains:
    """Where a step takes 10 ms and, if stated, a check of ``tokens`` so many."""
    times = StepTimes()
    for _ in range(2):  # the first of a kind does not count
        times.ran(TARGET, 1, STEP_MS)
        if check_ms is not None:
            times.ran_check(TARGET, tokens, check_ms)
    return Gains(times)


def test_nothing_is_drafted_until_a_step_is_known() -> None:
    assert Gains(StepTimes()).ranked(TARGET, {"free": 0.0}, 4) == []
    assert gains().ranked(TARGET, {}, 4) == []
    assert gains().ranked(TARGET, {"free": 0.0}, 0) == []


def test_a_draft_that_was_never_judged_is_tried() -> None:
    (best,) = gains().ranked(TARGET, {"free": 0.0}, 3)
    # No check has run: it is hoped to take what a step does, and 70 % of the tokens to be accepted.
    assert tuple(best) == ("free", 3, pytest.approx(1 + 0.7 + 0.7**2 + 0.7**3))


def test_the_number_of_tokens_follows_times_and_acceptance() -> None:
    known = gains(check_ms=14.0)  # of five tokens; of two 11 ms, of three 12 ms
    known.checked(TARGET, "half", drafted=40, judged=36, accepted=33, ms=14.0)
    share = (33 + 0.7 * 4) / (36 + 4)
    assert known.share(TARGET, "half") == pytest.approx(share)
    (best,) = known.ranked(TARGET, {"half": 5.0}, 4)
    expected = {
        count: 10 * sum(share**power for power in range(count + 1)) / (5 * count + 10 + count) for count in range(1, 5)
    }
    assert best.drafted == max(expected, key=lambda count: expected[count])
    assert best.factor == pytest.approx(expected[best.drafted])


def test_a_draft_that_is_refused_loses() -> None:
    known = gains(check_ms=14.0)
    for _ in range(6):
        known.checked(TARGET, "half", drafted=2, judged=1, accepted=0, ms=12.0)
    (best,) = known.ranked(TARGET, {"half": 5.0}, 4)
    assert best.factor < 0.9
    ranked = known.ranked(TARGET, {"half": 5.0, "free": 0.0}, 4)
    assert [gain.draft for gain in ranked] == ["free", "half"]


def test_a_later_generation_tries_again() -> None:
    known = gains()
    for _ in range(20):
        known.checked(TARGET, "half", drafted=1, judged=1, accepted=0, ms=10.0)
    shares = [known.share(TARGET, "half")]
    for _ in range(4):
        known.begin(TARGET)
        shares.append(known.share(TARGET, "half"))
    assert shares == sorted(shares)
    assert shares[0] < 0.12
    assert shares[-1] > 0.5
    other = replace(TARGET, id="other")
    known.checked(other, "half", drafted=1, judged=1, accepted=0, ms=10.0)
    before = known.share(other, "half")
    known.begin(TARGET)
    assert known.share(other, "half") == before


def test_what_was_judged_long_ago_is_forgotten() -> None:
    known = gains()
    for accepted in (0, 1):
        for _ in range(200):
            known.checked(TARGET, "half", drafted=1, judged=1, accepted=accepted, ms=10.0)
    assert known.share(TARGET, "half") > 0.9


def test_what_was_learned_is_where_others_start() -> None:
    known = gains(check_ms=14.0)
    known.checked(TARGET, "half", drafted=4, judged=4, accepted=3, ms=14.0)
    _, judged = known.found([TARGET])
    assert judged == [JudgedDraft("large", "half", 3.0, 4.0)]
    later = Gains(StepTimes())
    later.checked(TARGET, "other", drafted=1, judged=1, accepted=0, ms=9.0)
    found = HostDrafts(HOST, 1, "", 1, (RunTime("large", 1, 10.0),), (*judged, JudgedDraft("large", "other", 9.0, 9.0)))
    later.start_from(found, [TARGET])
    assert later.share(TARGET, "half") == known.share(TARGET, "half")
    assert later.share(TARGET, "other") == pytest.approx(2.8 / 5), "what was seen counts more"
    assert later.times.expected_ms(TARGET, 1) == 10.0


GOLDEN = Path(__file__).parents[3] / "golden"
LARGE = "ffn32.cached@b1_64-s1_40"
HERE = HostDrafts(
    this_host(),
    2,
    "2026-11-22T10:00:00+00:00",
    5,
    (RunTime(LARGE, 1, 10.0), RunTime(LARGE, 5, 14.0)),
    (JudgedDraft(LARGE, "n-gram", 3.5, 8.0),),
)
BOARD = replace(HERE, host=MeasuredHost("Cortex-A76", "aarch64", 4, "1.23.0"), threads=4)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return open_bundle(shutil.copytree(GOLDEN / "bundle-decoder", tmp_path / "lm.bundle"))


def test_hosts_are_kept_beside_each_other(bundle: Bundle) -> None:
    assert DraftCalibration.read(bundle) is None
    DraftCalibration.save(bundle, BOARD)
    assert DraftCalibration.save(bundle, HERE) == bundle.path / DRAFTS_NAME
    found = DraftCalibration.read(bundle)
    assert (found.of(HERE.host, 7), found.of(BOARD.host, 4)) == (HERE, BOARD)
    assert str(verify_bytes(bundle.path)).endswith(", 2 calibrations of drafts, every hash and seal as written")


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda one: one["times"][0].update(engine="other"), "engine 'other' does not generate in this bundle"),
        (lambda one: one["drafts"][0].update(target="other"), "engine 'other' does not generate in this bundle"),
        (lambda one: one["drafts"][0].update(draft="other"), "draft 'other' is no submodel that generates in this"),
        (lambda one: one["drafts"][0].update(accepted=9.0), "draft n-gram: 9.0 accepted of 8.0"),
        (lambda one: one["drafts"][0].update(judged=-1.0), "judged: expected at least 0"),
        (lambda one: one["times"][0].update(tokens=0), "tokens: expected at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(bundle: Bundle, edit: Callable[[Any], object], line: str) -> None:
    DraftCalibration.save(bundle, HERE)
    edit_sealed(bundle.path / DRAFTS_NAME, lambda data: edit(data["hosts"][0]))
    with pytest.raises(BundleFormatError) as refused:
        DraftCalibration.read(bundle)
    assert line in str(refused.value)
    assert str(refused.value).endswith("; remove it and run `nestforge calibrate` again")
