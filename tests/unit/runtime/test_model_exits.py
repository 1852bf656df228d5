"""A model with exits: which policy decides, what the answer says of it, and when the whole engine answers."""

import gc
import logging
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BundleCorruptError, BundleError, InputError, SelectionError
from nestforge.runtime.answer import Padding
from nestforge.runtime.exits.policy import CalibratedPolicy, ExitPolicy, closed, save_policy
from nestforge.strict import unstructure
from support.exit_bundles import every_exit, exits_manifest, policy, requests, write_exits_manifest

FEEDS = requests([16, 3, 9, 16, 5, 2], seed=1)


def left_at(thresholds: tuple[float, ...], exits: int = 3, feeds: Any = FEEDS) -> list[int]:
    """By numpy, the exit of every row."""
    found = every_exit(feeds["input_ids"], feeds["attention_mask"])[:exits]
    limits = (*thresholds, np.inf)
    return [
        int(np.argmax([e[row] <= limit for (_, _, e), limit in zip(found, limits, strict=True)])) for row in range(6)
    ]


def calibrated(name: str, thresholds: tuple[float, ...], histogram: tuple[int, ...], submodel: str) -> CalibratedPolicy:
    return replace(
        policy(name, submodel), budget="mean_flops<=1", thresholds=thresholds, histogram=histogram, engines=()
    )


@pytest.fixture
def own(exits_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exits_bundle, tmp_path / "own.bundle"))


@pytest.fixture
def with_policies(own: Path) -> Path:
    """Policies ``quick`` (the default) and ``careful`` of depth4, and another ``careful`` of depth2."""
    bundle = open_bundle(own)
    save_policy(bundle, calibrated("quick", (0.5, 0.5), (20, 20, 60), "depth4"), True)
    save_policy(bundle, calibrated("careful", (0.0, 0.0), (60, 20, 20), "depth4"), False)
    save_policy(bundle, calibrated("careful", (0.125,), (5, 95), "depth2"), False)
    return own


def test_the_models_own_gate_decides_where_nothing_is_asked(exits_bundle: Path) -> None:
    with nestforge.load(exits_bundle, threads=1) as model:
        answer = model(FEEDS)
        shallow = model(FEEDS, submodel="S")
    assert answer.exits.index.tolist() == left_at((0.25, 0.375))
    assert answer.exits.policy == ExitPolicy((0.25, 0.375), name="the model's own gate")
    assert answer.reason == "no limit given: the largest submodel; exits: the model's own gate"
    assert (answer.submodel, answer.engine, answer.bucket) == ("depth4", "depth4.to1@b4-s16", Bucket(4, 16))
    assert list(answer.outputs) == ["logits", "entropy"]
    assert answer["entropy"].tolist() == answer.exits.entropy.tolist()
    assert (answer.padding, answer.truncated, answer.residency) == (None, (), "packed")
    assert answer.timings.open > 0
    assert answer.timings.run > 0
    assert shallow.exits.policy.thresholds == (0.25,)
    assert shallow.exits.index.tolist() == left_at((0.25,), exits=2)
    assert shallow.reason == "submodel S requested; exits: the model's own gate"


def test_closed_exits_answer_as_the_whole_engine_does(exits_bundle: Path) -> None:
    with nestforge.load(exits_bundle, threads=1) as model:
        for name in ("depth2", "depth4"):
            whole = model(FEEDS, submodel=name, exits="off")
            chain = model(FEEDS, submodel=name, exits=closed(2 if name == "depth2" else 3))
            assert whole.exits is None
            assert whole.engine == f"{name}@b8-s16"
            assert whole.reason == f"submodel {name} requested; whole engine: exits off"
            for output in ("logits", "entropy"):
                assert whole[output].tolist() == chain[output].tolist()
            assert chain.exits.share.tolist() == [1.0] * 6


@pytest.mark.parametrize(
    ("asked", "thresholds"),
    [
        (0.5, (0.5, 0.5)),
        (1, (1.0, 1.0)),
        ((0.125, 0.875), (0.125, 0.875)),
        ([0.125, 0.875], (0.125, 0.875)),
        (np.array([0.125, 0.875]), (0.125, 0.875)),
        (np.float32(0.5), (0.5, 0.5)),
        (np.array(0.25), (0.25, 0.25)),
        (ExitPolicy((0.25, -1.0), name="mine"), (0.25, -1.0)),
    ],
    ids=["number", "whole", "tuple", "list", "array", "numpy", "array of one", "policy"],
)
def test_thresholds_requested(exits_bundle: Path, asked: Any, thresholds: tuple[float, float]) -> None:
    with nestforge.load(exits_bundle, threads=1) as model:
        answer = model(FEEDS, exits=asked)
    name = "mine" if isinstance(asked, ExitPolicy) else "thresholds requested"
    assert answer.exits.policy == ExitPolicy(thresholds, name=name)
    assert answer.reason.endswith(f"; exits: {name}")
    assert answer.exits.index.tolist() == left_at(thresholds)
    assert answer.exits.layer.tolist() == [(1, 2, 4)[index] for index in left_at(thresholds)]
    assert answer.exits.flops.tolist() == [1600 * layer for layer in answer.exits.layer.tolist()]
    assert answer.exits.share.tolist() == [layer / 4 for layer in answer.exits.layer.tolist()]


def test_the_answer_says_who_left_where_in_one_line(exits_bundle: Path) -> None:
    feeds = {name: array[:, :9] for name, array in requests([3, 9, 5], seed=1).items()}
    with nestforge.load(exits_bundle, threads=1) as model:
        text = repr(model(feeds, exits=10))
    assert text.startswith("Answer(logits float32[3, 3], entropy float32[3]; depth4.to1@b1-s16, ")
    assert ", padded b3-s9 -> b3-s16, rows left: 3 after layer 1; no limit given" in text
    assert "\n" not in text


def test_steps_that_were_cut_are_said(exits_bundle: Path) -> None:
    with nestforge.load(exits_bundle, threads=1) as model:
        answer = model(requests([3], 16), exits=10)
    assert answer.padding == Padding(Bucket(1, 16), Bucket(1, 8))
    assert answer.exits.share.tolist() == [0.125]  # one layer of four, half of the steps


def test_a_latency_limit_takes_the_whole_engine_unless_exits_are_requested(own: Path) -> None:
    from support.latencies import latency

    bundle = open_bundle(own)
    latencies = [latency(engine.id, 0.5) for engine in bundle.manifest.engines if engine.segment is None]
    write_exits_manifest(own, bundle.manifest, latencies)
    with nestforge.load(own, threads=1) as model:
        for limit in ({"latency_ms": 1.0}, {"budget": "quick"}):
            answer = model(FEEDS, **limit)
            assert answer.exits is None
            assert answer.engine == "depth4@b8-s16"
            assert answer.reason.endswith("; whole engine: exits speed up the mean, the limit is for every request")
            assert model(FEEDS, exits=0.5, **limit).exits is not None
        assert model(FEEDS, budget="small").exits is not None
        assert model(FEEDS, memory_mb=1).exits is not None


def test_calibrated_policies_by_default_and_by_name(with_policies: Path) -> None:
    with nestforge.load(with_policies, threads=1) as model:
        default, named = model(FEEDS), model(FEEDS, exits="careful")
        shallow = model(FEEDS, submodel="S", exits="careful")
        gate = model(FEEDS, submodel="S")
        with pytest.raises(
            SelectionError, match="no calibrated exits 'fast' of submodel depth4; it has careful, quick"
        ):
            model(FEEDS, exits="fast")
    assert default.exits.policy == ExitPolicy((0.5, 0.5), name="quick")
    assert default.reason.endswith("; exits: calibrated quick for mean_flops<=1, the default")
    assert default.exits.index.tolist() == left_at((0.5, 0.5))
    assert named.exits.policy.thresholds == (0.0, 0.0)
    assert named.reason.endswith("; exits: calibrated careful for mean_flops<=1, requested")
    assert shallow.exits.policy.thresholds == (0.125,)
    assert gate.exits.policy.name == "the model's own gate"  # no default for this submodel


def test_a_calibrated_policy_that_closes_every_exit_is_the_whole_engine(own: Path) -> None:
    bundle = open_bundle(own)
    deep = calibrated("deep", (-1.0, -1.0), (0, 0, 40), bundle.manifest.submodels[-1].id)
    save_policy(bundle, deep, default=True)
    with nestforge.load(own) as model:
        for asked in (None, "deep"):
            answer = model(FEEDS, exits=asked)
            assert answer.exits is None
            assert "whole engine: calibrated deep for mean_flops<=1 closes every exit" in answer.reason


def test_drift_is_counted_by_policy_and_said_once(with_policies: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "nestforge")
    with nestforge.load(with_policies, threads=1) as model:
        assert model.drift() == {}
        for _ in range(50):
            model(FEEDS, exits="careful")
            model(FEEDS, exits=0.0)  # thresholds of no policy count for none
        model(FEEDS, submodel="S", exits="careful")
        drift = model.drift()
        assert list(drift) == ["careful of depth4"]  # the others have answered too few rows
        assert drift["careful of depth4"].rows == 300
        left = np.bincount(left_at((0.0, 0.0)), minlength=3) / 6
        assert drift["careful of depth4"].live == pytest.approx(left.tolist())
        assert drift["careful of depth4"].drifted
    (record,) = caplog.records
    assert record.getMessage().startswith("exits careful of submodel depth4: rows leave elsewhere than in the calibrat")


def test_rows_that_leave_as_expected_do_not_drift(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle = open_bundle(own)
    histogram = tuple(np.bincount(left_at((0.5, 0.5)), minlength=3).tolist())
    save_policy(bundle, calibrated("quick", (0.5, 0.5), histogram, "depth4"), True)
    with nestforge.load(own, threads=1) as model:
        for _ in range(20):
            model(FEEDS)
        assert model.drift()["quick"].rows == 120
        assert not model.drift()["quick"].drifted
    assert caplog.records == []


def test_a_calibration_of_another_bundle_is_refused_at_load(with_policies: Path) -> None:
    bundle = open_bundle(with_policies)
    write_exits_manifest(with_policies, replace(bundle.manifest, name="other"))
    with pytest.raises(BundleCorruptError, match="belongs to another manifest"):
        nestforge.load(with_policies, threads=1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("quick", "exits 'quick': bundle .* has no calibration.json; run `nestforge calibrate`, or ask for thresholds"),
        ((0.1,), r"thresholds: expected one number, or 2 \(one for every exit but the last\), got 1"),
        ([0.1, "x"], "thresholds: expected numbers in nats, got 'x'"),
        (True, "thresholds: expected numbers in nats, got True"),
        (float("nan"), "thresholds: expected numbers in nats, got nan"),
        (ExitPolicy((0.1,)), r"thresholds: expected one number, or 2 \(one for every exit but the last\), got 1"),
        (
            {"tau": 1},
            "exits: expected thresholds in nats, a calibrated policy's name, an ExitPolicy or 'off', got {'tau'",
        ),
        (object, "exits: expected thresholds in nats, a calibrated policy's name, an ExitPolicy or 'off', got <class"),
    ],
    ids=["name", "count", "text", "bool", "nan", "policy", "mapping", "class"],
)
def test_refuses_exits_that_are_none(exits_bundle: Path, asked: Any, message: str) -> None:
    with nestforge.load(exits_bundle, threads=1) as model, pytest.raises(SelectionError, match=f"^{message}") as error:
        model(FEEDS, exits=asked)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        (requests([17]), "input of 1 rows x 17 is larger than every bucket of this bundle"),
        ({name: array[:0] for name, array in requests([4]).items()}, "input input_ids: expected int64"),
        ([], "text: expected a text or a non-empty list|bundle .* has no tokenizer"),
    ],
    ids=["steps", "empty", "no texts"],
)
def test_both_ways_refuse_the_same_inputs(exits_bundle: Path, feeds: Any, message: str) -> None:
    with nestforge.load(exits_bundle, threads=1) as model:
        for exits in ("off", 0.5):
            with pytest.raises(InputError, match=message):
                model(feeds, exits=exits)


def test_an_answer_is_the_callers_to_change(with_policies: Path) -> None:
    with nestforge.load(with_policies, threads=1) as model:
        for _ in range(40):
            exits = model(FEEDS).exits
            exits.index[:] = 100
        (drift,) = model.drift().values()
    assert drift.rows == 240
    assert len(drift.live) == 3


def test_a_closed_model_holds_no_session(exits_bundle: Path) -> None:
    with nestforge.load(exits_bundle, threads=1) as model:
        model(FEEDS, exits=0.5)
        pool = model._pool
        sessions = [weakref.ref(runner._session) for runner in pool._open.values()]
        assert sessions
    gc.collect()
    assert [session() for session in sessions] == [None] * len(sessions)


def test_engines_that_are_said_to_cost_nothing(own: Path) -> None:
    manifest = open_bundle(own).manifest
    write_exits_manifest(own, replace(manifest, engines=tuple(replace(engine, flops=0) for engine in manifest.engines)))
    with nestforge.load(own, threads=1) as model:
        exits = model(FEEDS, exits=0.5).exits
        assert exits.share.tolist() == [0.0] * 6


def test_a_model_without_exits_answers_as_ever(own: Path) -> None:
    manifest = open_bundle(own).manifest
    engines = tuple(engine for engine in manifest.engines if engine.segment is None)
    write_exits_manifest(own, unstructure(replace(manifest, exits=None, engines=engines)))
    with nestforge.load(own, threads=1) as model:
        answer = model(FEEDS)
        assert (answer.reason, answer.exits) == ("no limit given: the largest submodel", None)
        assert model(FEEDS, exits="off").exits is None
        assert model.drift() == {}
        for asked in (0.5, np.array([0.25, 0.5])):
            with pytest.raises(SelectionError, match="this model has no exits to leave at; expected none or 'off'"):
                model(FEEDS, exits=asked)


def test_without_a_gate_or_a_calibration_the_whole_engine_answers(own: Path) -> None:
    manifest = open_bundle(own).manifest
    assert manifest.exits is not None
    write_exits_manifest(own, replace(manifest, exits=replace(manifest.exits, gate=None)))
    with nestforge.load(own, threads=1) as model:
        answer = model(FEEDS)
        assert answer.exits is None
        assert answer.reason == "no limit given: the largest submodel; whole engine: no calibrated exits"
        assert model(FEEDS, exits=0.5).exits is not None


def test_under_a_memory_cap_exits_are_open_only_if_every_segment_fits(exits_bundle: Path) -> None:
    manifest = exits_manifest()
    own = {engine.file: engine.private_bytes + engine.activation_bytes for engine in manifest.engines}
    everything = (sum(own.values()) + max(entry.weight_bytes for entry in manifest.submodels)) / 1e6
    with nestforge.load(exits_bundle, threads=1, memory_mb=everything) as model:
        assert set(model.residencies) == {engine.id for engine in manifest.engines}
        assert model(FEEDS).exits is not None
    with nestforge.load(exits_bundle, threads=1, memory_mb=everything - 1e-5) as model:
        answer = model(FEEDS)
        assert answer.exits is None
        assert "; whole engine: submodel depth4: its exits cannot be used here, engine depth4.to" in answer.reason
        assert "is left out (by memory_mb, for want of its backend, or as a range on a GPU)" in answer.reason
        with pytest.raises(SelectionError, match=r"submodel depth4: its exits cannot be used here, engine depth4.to"):
            model(FEEDS, exits=0.5)


def test_a_closed_model_answers_no_more(exits_bundle: Path) -> None:
    model: nestforge.ElasticModel = nestforge.load(exits_bundle, threads=1)
    model(FEEDS, exits=0.5)
    model.close()
    with pytest.raises(BundleError):
        model(FEEDS, exits=0.5)


def test_many_threads_get_their_own_answers(exits_bundle: Path) -> None:
    with nestforge.load(exits_bundle, threads=1, preload=True) as model:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            feeds = requests(rng.integers(1, 17, 6).tolist(), seed=seed)
            limits = (seed % 8 / 8, seed % 5 / 8)
            answer = model(feeds, exits=limits)
            assert answer.exits.index.tolist() == left_at(limits, feeds=feeds)
            found = every_exit(feeds["input_ids"], feeds["attention_mask"])
            for row, index in enumerate(answer.exits.index):
                assert answer["logits"][row].tolist() == found[index][1][row].tolist()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(200)))
