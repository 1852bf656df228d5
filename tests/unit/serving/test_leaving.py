"""Rows of several requests between the segments of a chain: the queue, real engines and no clock."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.runtime.exits.policy import Calibration
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from nestforge.runtime.request import Request
from nestforge.serving.scheduler import Further, Job, Run, Scheduler
from nestforge.serving.served import Asked, Reply, Served, Terms, Work, options
from support.exit_bundles import exits_manifest, requests, write_exits_bundle
from support.latencies import latency

PATIENCE_MS = 1e6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticModel]:
    """Engines of which one run of many rows takes little longer than one of a few."""
    figures = [latency(e.id, 0.0, 100.0 + e.bucket.batch) for e in exits_manifest().engines]
    with load(write_exits_bundle(tmp_path_factory.mktemp("bundles") / "b", latencies=figures)) as opened:
        yield opened


class Played:
    """A server without a clock: each run takes 1 ms, and what comes in the meantime has come before it stops."""

    def __init__(self, served: Served, workers: int = 1) -> None:
        self.served, self.scheduler, self.now = served, Scheduler(options, workers), 0.0
        self.works: dict[Job, tuple[int, Work]] = {}
        self.replies: dict[int, Reply] = {}
        self.running: list[Run] = []
        self.stopped, self.most_on_their_way = 0, 0

    def submit(self, number: int, feeds: Any, deadline_ms: float | None = None, **stated: Any) -> Job:
        asked = Asked(Request(deadline_ms=None if deadline_ms is None else 1.0, **stated))
        work = Work(asked, deadline_ms, feeds)
        job = self.served.job(work, Terms(f"client {number}", self.now, PATIENCE_MS, deadline_ms))
        self.scheduler.submit(job, self.now)
        self.works[job] = number, work
        return job

    def start(self) -> None:
        while run := self.scheduler.start(self.now):
            assert len({job.key for job in run.jobs}) == 1
            self.running.append(run)

    def end(self) -> Run:
        """The first of those that run ends."""
        run, self.now = self.running.pop(0), self.now + 1.0
        with patch("nestforge.serving.served.now_ms", lambda: self.now):
            found = self.served.replies([self.works[job][1] for job in run.jobs], run)
        self.scheduler.end(run, self.now)
        for job, one in zip(run.jobs, found, strict=True):
            number, _ = self.works.pop(job)
            if isinstance(one, Further):
                self.stopped += 1
                self.works[one.job] = number, one.work
                self.scheduler.submit(one.job, self.now)
            else:
                self.replies[number] = one
        waiting = [job for job in self.works if job.continues]
        self.most_on_their_way = max(self.most_on_their_way, sum(job.rows for job in waiting))
        return run

    def until_all_are_answered(self) -> None:
        self.start()
        while self.running:
            self.end()
            self.start()


REQUESTS = st.lists(st.lists(st.integers(1, 16), min_size=1, max_size=4), min_size=2, max_size=14)


@settings(deadline=None, max_examples=60)
@given(lengths=REQUESTS, runs_between=st.lists(st.integers(0, 2), min_size=14, max_size=14), workers=st.integers(1, 2))
def test_whoever_joins_when_answers_are_those_of_each_request_alone(
    model: ElasticModel, lengths: list[list[int]], runs_between: list[int], workers: int
) -> None:
    played = Played(Served("exits", model), workers)
    given_feeds = [requests(each, seed=number) for number, each in enumerate(lengths)]
    for number, feeds in enumerate(given_feeds):
        played.submit(number, feeds)
        played.start()
        for _ in range(runs_between[number]):
            if played.running:
                played.end()
                played.start()
    played.until_all_are_answered()
    assert played.scheduler.waiting == len(played.works) == 0
    assert played.most_on_their_way <= 8 * 2 * workers, "as many as a run takes, before each of two segments"
    for number, feeds in enumerate(given_feeds):
        alone, reply = model(feeds), played.replies[number]
        assert reply.exits == alone.exits.layer.tolist()
        assert {name: array.tolist() for name, array in reply.outputs.items()} == {
            name: array.tolist() for name, array in alone.outputs.items()
        }
        assert (reply.submodel, reply.reason) == (alone.submodel, alone.reason)


def left_at(model: ElasticModel, feeds: Any) -> int:
    answer = model(feeds)
    return int(answer.exits.layer[0])


def staying(model: ElasticModel, count: int) -> Iterator[Any]:
    """Requests of one row that pass the first exit."""
    for seed in range(1000):
        feeds = requests([8], seed=seed)
        if left_at(model, feeds) > 1:
            yield feeds
            count -= 1
            if not count:
                return


def test_a_row_that_comes_during_a_run_joins_it_behind_the_next_exit(model: ElasticModel) -> None:
    played, (first, second) = Played(Served("exits", model)), staying(model, 2)
    played.submit(0, first)
    played.start()
    played.submit(1, second)  # while the first runs
    seen = []
    while played.running:
        seen.append([job.client for job in played.end().jobs])
        played.start()
    assert seen == [["client 0"], ["client 1"], ["client 0", "client 1"]]
    assert played.stopped == 2
    assert played.replies[0].shared == played.replies[1].shared == 2


def test_what_is_left_stays_with_its_submodel_though_fewer_rows_would_get_another(model: ElasticModel) -> None:
    played, stays = Played(Served("exits", model)), next(staying(model, 1))
    goes = next(feeds for seed in range(99) for feeds in [requests([8], seed=seed)] if left_at(model, feeds) == 1)
    rows = {name: np.concatenate([array, goes[name]]) for name, array in stays.items()}
    real = played.served.candidates

    def by_rows(asked: Asked, count: int, steps: int, lengths: Any = None) -> Any:
        named = asked if asked.request.submodel or count == 1 else asked._replace(request=Request(submodel="depth2"))
        return real(named, count, steps, lengths)

    with patch.object(played.served, "candidates", by_rows), patch.object(Scheduler, "stops", lambda *_: True):
        played.submit(0, rows)
        played.until_all_are_answered()
    assert played.stopped == 1
    reply, alone = played.replies[0], model(rows, submodel="depth2")
    assert (reply.submodel, reply.exits) == ("depth2", alone.exits.layer.tolist())
    assert reply.outputs["logits"].tolist() == alone.outputs["logits"].tolist()


def test_nothing_stops_where_nobody_waits(model: ElasticModel) -> None:
    played = Played(Served("exits", model))
    for number, feeds in enumerate(staying(model, 2)):
        played.submit(number, feeds)
        played.until_all_are_answered()
    assert played.stopped == 0


def test_a_client_that_goes_away_leaves_nothing(model: ElasticModel) -> None:
    played, (first, second) = Played(Served("exits", model)), staying(model, 2)
    played.submit(0, first)
    played.start()
    other = played.submit(1, second)
    played.end()
    (gone,) = (job for job in played.works if job.continues)
    played.scheduler.cancel(gone)
    played.scheduler.cancel(other)
    assert (played.scheduler.waiting, played.scheduler.running) == (0, 0)
    assert played.scheduler.start(played.now) is None


def test_requests_that_differ_in_their_choice_and_those_with_a_deadline_do_not_join(model: ElasticModel) -> None:
    for stated in ({"submodel": "depth4"}, {"deadline_ms": 1000.0}):
        played, (first, second) = Played(Served("exits", model)), staying(model, 2)
        played.submit(0, first)
        played.start()
        played.submit(1, second, **stated)
        played.until_all_are_answered()
        assert played.stopped == 0
        assert played.replies[1].exits is (None if "deadline_ms" in stated else played.replies[1].exits)


@pytest.mark.parametrize("rule", ["per_row", "batch_max"])
def test_nobody_joins_rows_that_leave_together(model: ElasticModel, rule: str) -> None:
    policies = (SimpleNamespace(rule=rule),)
    with patch.object(Calibration, "read", return_value=SimpleNamespace(policies=policies)):
        played = Played(Served("exits", model))
    first, second = staying(model, 2)
    played.submit(0, first)
    played.start()
    played.submit(1, second)
    played.until_all_are_answered()
    assert (played.stopped > 0) is (rule == "per_row")


def test_a_model_whose_padding_counts_runs_to_the_end(tmp_path: Path) -> None:
    with load(write_exits_bundle(tmp_path / "b", trims=False)) as padded:
        served = Served("exits", padded)
        job = served.job(Work(Asked(Request()), None, requests([8])), Terms("a", 0.0, PATIENCE_MS, None))
        assert served._exits(Asked(Request()), job.alone[0]) is None
