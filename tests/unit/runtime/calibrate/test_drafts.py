"""Drafts calibrated on a bundle that generates: what is kept, and what ``auto`` makes of it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from nestforge.bundle.manifest import DRAFTS_NAME
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleFormatError, InputError, SelectionError
from nestforge.runtime.calibrate.drafts import DEFAULT_TEXTS, calibrate_drafts
from nestforge.runtime.generation.draft_gains import DraftCalibration, JudgedDraft, RunTime
from nestforge.runtime.load import load
from support.sealing import edit_sealed

GOLDEN = Path(__file__).parents[3] / "golden"
LARGE, SMALL = "ffn32.cached@b1_64-s1_40", "ffn8.cached@b1_64-s1_40"


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return open_bundle(shutil.copytree(GOLDEN / "bundle-decoder", tmp_path / "lm.bundle"))


def test_every_draft_is_judged_and_every_run_timed(bundle: Bundle) -> None:
    seen = []
    found = calibrate_drafts(bundle, DEFAULT_TEXTS * 4, threads=1, progress=lambda *at: seen.append(at))
    assert (found.texts, found.threads) == (16, 1)
    assert seen[-1] == ("continue texts", 16, 16)
    by_draft = {draft.draft: draft for draft in found.drafts}
    assert all(draft.target == LARGE for draft in found.drafts)
    assert by_draft["ffn8"].judged > 8
    assert all(0 <= draft.accepted <= draft.judged <= 64 for draft in found.drafts)
    timed = {(time.engine, time.tokens) for time in found.times}
    assert timed >= {(LARGE, 1), (SMALL, 1), (LARGE, 2), (LARGE, 5)}
    assert all(time.ms > 0 for time in found.times)


def test_auto_starts_from_what_this_host_found(bundle: Bundle) -> None:
    """Without it the first step of a process is not yet known, and nothing is drafted until it is."""
    found = calibrate_drafts(bundle, DEFAULT_TEXTS[:1], threads=1)
    times = (RunTime(LARGE, 1, 10.0), RunTime(SMALL, 1, 0.1), RunTime(LARGE, 5, 11.0))
    DraftCalibration.save(bundle, replace(found, times=times, drafts=(JudgedDraft(LARGE, "ffn8", 40.0, 40.0),)))
    with load(bundle.path, threads=1) as model:
        row = model.generate([5, 7], max_tokens=3, draft="auto", stop=[]).rows[0]
        _, second = row.runs
        assert second.reason.startswith("no limit given: the largest submodel; draft auto: ffn8 drafts; expected times")
        assert row.drafts[0].draft == "ffn8"


def test_a_later_calibration_begins_anew(bundle: Bundle) -> None:
    found = calibrate_drafts(bundle, DEFAULT_TEXTS[:1], threads=1)
    absurd = replace(found, times=(RunTime(LARGE, 7, 1e6),), drafts=(JudgedDraft(LARGE, "ffn8", 1e6, 1e6),))
    DraftCalibration.save(bundle, absurd)
    again = calibrate_drafts(bundle, DEFAULT_TEXTS[:1], threads=1)
    assert max(time.ms for time in again.times) < 1e5
    assert max(draft.judged for draft in again.drafts) <= 64


def test_another_hosts_figures_are_not_used(bundle: Bundle) -> None:
    found = calibrate_drafts(bundle, DEFAULT_TEXTS[:1], threads=1)
    DraftCalibration.save(bundle, replace(found, host=replace(found.host, cpu="another")))
    with load(bundle.path, threads=1) as model:
        model.generate([5, 7], max_tokens=2, draft="auto", stop=[])
        times, judged = model.generate.learned()
    assert (times, judged) == ([], [])


def test_a_damaged_file_is_refused_where_auto_would_read_it(bundle: Bundle) -> None:
    path = DraftCalibration.save(bundle, calibrate_drafts(bundle, DEFAULT_TEXTS[:1], threads=1))
    edit_sealed(path, lambda data: data["hosts"][0].update(texts=0))
    with load(bundle.path, threads=1) as model:
        assert model.generate([5, 7], max_tokens=2).rows[0].tokens
        with pytest.raises(BundleFormatError, match=rf"{DRAFTS_NAME}: hosts\[0\]: texts: expected at least 1, got 0"):
            model.generate([5, 7], max_tokens=2, draft="auto")


def test_what_cannot_be_calibrated_is_refused(bundle: Bundle) -> None:
    with pytest.raises(InputError, match="texts: expected at least one"):
        calibrate_drafts(bundle, [])
    with pytest.raises(SelectionError, match="no submodel 'ffn7'"):
        calibrate_drafts(bundle, submodel="ffn7")
    with pytest.raises(InputError, match="has no engines that generate, so no drafts to calibrate"):
        calibrate_drafts(open_bundle(GOLDEN / "bundle-exits"))
