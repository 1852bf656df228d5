from collections.abc import Callable
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.errors import InputError
from nestforge.runtime.answer import Limit, Padding
from nestforge.runtime.exits.policy import ExitPolicy
from support.exit_bundles import requests
from support.sealing import edit_sealed

Feeds = Callable[..., dict[str, Any]]
Reference = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("kind", ["tiny_bundle", "range_bundle"])
def test_any_number_of_rows_is_answered_in_runs(
    kind: str, request: pytest.FixtureRequest, feeds: Feeds, expected: Reference
) -> None:
    inputs = feeds(5, 9)
    with nestforge.load(request.getfixturevalue(kind), threads=1) as model:
        answer = model(inputs, submodel="S")
        assert model._in_flight.load().remaining_ms == []
    want = expected(16, inputs["input_ids"], inputs["attention_mask"])
    for name in ("hidden", "total"):
        np.testing.assert_allclose(answer[name], want[name], rtol=1e-5, atol=1e-5)
    if kind == "range_bundle":
        sizes, paddings, padding = [4, 1], [None, None], None
    else:
        filled = Bucket(2, 16)
        sizes, paddings = [2, 2, 1], [*[Padding(Bucket(2, 9), filled)] * 2, Padding(Bucket(1, 9), filled)]
        padding = Padding(Bucket(5, 9), Bucket(6, 16))
    assert [len(run.rows) for run in answer.runs] == sizes
    assert [run.padding for run in answer.runs] == paddings
    assert answer.padding == padding
    assert answer.timings.run == pytest.approx(sum(run.run_ms for run in answer.runs))
    assert answer.engine == answer.runs[0].engine
    assert f"5 rows in {len(sizes)} runs, since no engine takes them at once" in answer.reason
    assert f" in {len(sizes)} runs" in repr(answer)
    assert str(answer.runs[0]).startswith(f"{sizes[0]} rows")


def test_one_run_is_no_list_of_runs(tiny_bundle: Path, feeds: Feeds) -> None:
    with nestforge.load(tiny_bundle, threads=1) as model:
        assert model(feeds(2, 7)).runs == ()


def test_texts_run_at_their_own_lengths_and_are_answered_as_alone(tiny_bundle: Path) -> None:
    texts = ["nest", "a nest of models a nest of", "a nest", "a " * 20]
    with nestforge.load(tiny_bundle, threads=1) as model:
        answer = model(texts, truncate=True)
        alone = [model(text, truncate=True) for text in texts]
    assert [(run.rows.tolist(), run.engine) for run in answer.runs] == [
        ([3, 1], "ffn32@b2-s16"),
        ([2], "ffn32@b1-s8"),
        ([0], "ffn32@b1-s8"),
    ]
    assert answer.truncated == (3,)
    for row, one in enumerate(alone):
        np.testing.assert_allclose(answer["total"][row], one["total"][0], rtol=1e-5, atol=1e-5)
        steps = one["hidden"].shape[1]
        np.testing.assert_allclose(answer["hidden"][row, :steps], one["hidden"][0], rtol=1e-5, atol=1e-5)
        assert not answer["hidden"][row, steps:].any()
    assert answer["hidden"].shape == (4, 16, 16)


def test_every_run_is_learnt_from(tiny_bundle: Path, feeds: Feeds) -> None:
    with nestforge.load(tiny_bundle, threads=1) as model:
        for _ in range(3):  # two runs each; the first of an engine is not counted
            model(feeds(4, 16))
        estimate = model.choose(2, 16).estimate
    assert estimate.is_seen
    assert not estimate.is_new


def test_a_wrong_value_is_named_by_its_row_before_any_run(tiny_bundle: Path, feeds: Feeds) -> None:
    inputs = feeds(5, 8)
    inputs["attention_mask"][4] = 7
    with (
        nestforge.load(tiny_bundle, threads=1) as model,
        pytest.raises(InputError, match=r"attention_mask: values 1..7"),
    ):
        model(inputs)


@pytest.mark.parametrize("rule", ["per_row", "batch_max"])
def test_rows_of_several_runs_leave_early(exits_bundle: Path, rule: Any) -> None:
    rows = requests([1 + row % 16 for row in range(21)], 16)
    policy = ExitPolicy((0.6, 0.6), rule=rule)
    with nestforge.load(exits_bundle, threads=1) as model:
        answer = model(rows, exits=policy)
        parts = [model({name: array[run.rows] for name, array in rows.items()}, exits=policy) for run in answer.runs]
    assert [len(run.rows) for run in answer.runs] == [8, 8, 5]
    for run, alone in zip(answer.runs, parts, strict=True):
        assert answer.exits.index[run.rows].tolist() == alone.exits.index.tolist()
        assert answer.exits.flops[run.rows].tolist() == alone.exits.flops.tolist()
        np.testing.assert_array_equal(answer["logits"][run.rows], alone["logits"])


def test_an_answer_says_whether_its_limit_was_kept(own_bundle: Path, feeds: Feeds) -> None:
    def optimistic(record: dict[str, Any]) -> None:
        for latency in record["latencies"]:
            latency["points"] = [{**latency["points"][-1], "predicted_ms": 1e-6}]
            for name in ("measured_p50_ms", "measured_p95_ms"):
                latency["points"][0].pop(name, None)
            latency.pop("residency", None)

    edit_sealed(own_bundle / "build.json", optimistic)
    with nestforge.load(own_bundle, threads=1) as model:
        kept = model(feeds(1, 8), latency_ms=1e6)
        missed = model(feeds(1, 8), latency_ms=1e-5)
        in_time = model(feeds(3, 9), deadline_ms=1e6)
        assert model(feeds(1, 8)).limit is None
    assert kept.limit == Limit("latency_ms", 1e6, kept.timings.run)
    assert kept.limit.kept
    assert not missed.limit.kept
    assert str(missed.limit).startswith("`latency_ms=1e-05` missed: took ")
    assert "`latency_ms=1e-05` missed" in repr(missed)
    assert in_time.limit.kept
    assert in_time.limit.took_ms > in_time.timings.run == sum(run.run_ms for run in in_time.runs)


@pytest.mark.parametrize("kind", ["tiny_bundle", "exits_bundle"])
def test_the_first_run_of_an_engine_is_said(kind: str, request: pytest.FixtureRequest, feeds: Feeds) -> None:
    with nestforge.load(request.getfixturevalue(kind), threads=1, preload=True) as model:
        exits = 0.5 if kind == "exits_bundle" else None
        found = [model(feeds(1, 8), exits=exits) for _ in range(2)]
        other = model(feeds(1, 8), submodel="S", exits="off" if exits else None)
    assert [answer.first_run for answer in (*found, other)] == [True, False, True]
    assert "ms (first run)" in repr(other)
