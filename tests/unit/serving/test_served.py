"""The protocols of a server: one token, what is kept of requests, and budgets as parameters of Triton's."""

import asyncio
import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import ref

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import InputError
from nestforge.runtime.exits.policy import Calibration
from nestforge.runtime.inputs.arrays import random_feeds
from nestforge.runtime.load import load
from nestforge.runtime.request import Request
from nestforge.serving.app import HEADERS, Limits, Problem, Service
from nestforge.serving.desk import Desk
from nestforge.serving.kserve import _short_head
from nestforge.serving.scheduler import Run
from nestforge.serving.served import Asked, Reply, Served, Terms, Work, small_submodels
from nestforge.serving.triton import options_of
from starlette.requests import Request as Http
from starlette.types import Message
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def test_a_token_keeps_the_space_before_it() -> None:
    """A decoder that takes it from a text's first token takes it from one alone too."""
    tokenizer = Tokenizer(models.BPE({"▁the": 0, "the": 1, "▁a": 2, "a": 3, "▁": 4}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    served: Any = SimpleNamespace(_texts=SimpleNamespace(encoder=lambda: SimpleNamespace(tokenizer=tokenizer)))
    assert tokenizer.decode([0]) == tokenizer.decode([1]) == "the"
    assert Served._written(served, 0) == (" the", list(b" the"))
    assert Served._written(served, 1) == ("the", list(b"the"))


def test_what_is_remembered_of_requests_keeps_no_bundle(tiny_bundle: Path) -> None:
    text = b'{"inputs": [], "parameters": {"submodel": "S"}}'
    with load(tiny_bundle) as model:
        served = Served("tiny", model)
        head = served.remembered(_short_head, text, ())
        assert served.remembered(_short_head, text, ()) is head
        assert served.remembered(_short_head, text, (("nestforge-client", "a"),)) is not head
    gone = ref(served)
    del served, head
    gc.collect()
    assert gone() is None


def test_engines_on_one_thread_answer_as_those_on_all_but_for_limits_in_time(tiny_bundle: Path) -> None:
    with load(tiny_bundle, threads=2) as model, load(tiny_bundle, threads=1) as narrow:
        served = Served("tiny", model, narrow)
        served.warm_up()
        feeds = random_feeds(model.inputs, Bucket(1, 5))
        terms = Terms("one", 0.0, 1e3, None)
        work = Work(Asked(Request()), None, feeds)
        job = served.job(work, terms)
        assert [(one.engine.submodel, one.cores) for one in job.alone] == [("ffn32", 2), ("ffn32", 1)]
        assert sorted(one.cores for one in served.together(work.asked, 1, 5)) == [1, 2]
        answers = [served.replies([work], Run((job,), one, "")) for one in job.alone]
        for (wide,), (alone,) in [answers]:
            assert isinstance(wide, Reply)
            assert isinstance(alone, Reply)
            assert (alone.submodel, alone.reason) == (wide.submodel, wide.reason)
            for name, output in wide.outputs.items():
                np.testing.assert_array_equal(alone.outputs[name], output)
        timed = served.job(Work(Asked(Request(deadline_ms=1.0)), 50.0, feeds), terms)
        assert Counter(one.cores for one in timed.alone) == {2: len(model.submodels), 1: len(model.submodels)}
        limited = served.job(Work(Asked(Request(latency_ms=1e6)), None, feeds), terms)
        assert [one.cores for one in limited.alone] == [2]


def test_small_engines_alone_run_side_by_side(tiny_bundle: Path, exits_bundle: Path) -> None:
    manifest = open_bundle(tiny_bundle).manifest
    assert small_submodels(manifest) == {one.id for one in manifest.submodels}
    large = replace(manifest.largest_first[0], weight_bytes=129 * 10**6)
    assert large.id not in small_submodels(replace(manifest, submodels=(large, *manifest.submodels[:-1])))
    assert small_submodels(open_bundle(exits_bundle).manifest) == set()
    plans = tuple(replace(engine, backend="tensorrt") for engine in manifest.engines)
    assert small_submodels(replace(manifest, engines=plans)) == set(), "a GPU has no second copy for a thread"


def test_rows_of_several_requests_leave_a_shared_run_where_they_leave_alone(exits_bundle: Path) -> None:
    with load(exits_bundle) as model:
        served = Served("exits", model)
        works = [
            Work(Asked(Request()), None, random_feeds(model.inputs, Bucket(1, steps), seed))
            for seed, steps in enumerate((8, 5, 5, 8))  # these rows leave at 1, 1, 4 and 2
        ]
        jobs = [served.job(work, Terms("one", 0.0, 1e3, None)) for work in works]
        assert len({job.key for job in jobs}) == 1
        left = set()
        for pair in ((0, 1), (2, 3)):
            asked, shared = [works[one] for one in pair], [jobs[one] for one in pair]
            (together,) = served.together(asked[0].asked, 2, max(job.steps for job in shared))
            found = served.replies(asked, Run(tuple(shared), together, ""))
            for work, job, reply in zip(asked, shared, found, strict=True):
                (alone,) = served.replies([work], Run((job,), job.alone[0], ""))
                assert isinstance(reply, Reply)
                assert isinstance(alone, Reply)
                assert reply.shared == 2
                assert alone.exits is not None
                assert reply.exits == alone.exits
                left.update(reply.exits)
                for name, output in alone.outputs.items():
                    np.testing.assert_allclose(reply.outputs[name], output, atol=1e-5)
        assert left == {1, 2, 4}


def test_a_policy_by_which_all_rows_leave_together_shares_no_run(exits_bundle: Path) -> None:
    with load(exits_bundle) as model:
        for rule, shares in (("per_row", True), ("batch_max", False)):
            policies = (SimpleNamespace(rule="per_row"), SimpleNamespace(rule=rule))
            with patch.object(Calibration, "read", return_value=SimpleNamespace(policies=policies)):
                assert Served("exits", model)._shares is shares


class Part(bytes):
    """A part of a body that counts how often its size is asked."""

    asked = 0

    def __len__(self) -> int:
        Part.asked += 1
        return super().__len__()


def test_a_body_in_many_parts_is_counted_as_it_comes() -> None:
    left = [Part(b"x") for _ in range(1000)]

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

    async def read() -> None:
        desk = Desk(1, 1)
        request = Http({"type": "http", HEADERS: {}}, receive)
        assert await Service({}, desk, Limits()).body(request) == b"x" * 1000
        assert Part.asked <= 2000  # not once for each that came before
        left.extend(Part(b"x") for _ in range(1000))
        with pytest.raises(Problem, match="at most 10 bytes"):
            await Service({}, desk, Limits(body_bytes=10)).body(request)
        assert len(left) == 989
        desk.close()

    asyncio.run(read())


def test_parameters_of_a_request() -> None:
    assert options_of({"latency_ms": "2.5", "submodel": "S"}) == {"latency_ms": 2.5, "submodel": "S"}
    assert options_of({"deadline_ms": 20, "dimensions": 8}) == {"deadline_ms": 20.0, "dimensions": 8}
    assert options_of({"exits": "0.3", "truncate": True}) == {"exits": 0.3, "truncate": True}
    assert options_of({"exits": "off"}) == {"exits": "off"}
    assert options_of({"exits": "0.3,0.5"}) == {"exits": (0.3, 0.5)}
    for wrong, says in (
        ({"latency": 1}, "no parameter 'latency'; did you mean 'latency_ms'"),
        ({"latency_ms": "soon"}, "latency_ms: expected a positive number, got 'soon'"),
        ({"deadline_ms": 0}, "deadline_ms: expected a positive number, got 0"),
        ({"submodel": 3}, "submodel: expected a name, got 3"),
    ):
        with pytest.raises(InputError, match=says):
            options_of(wrong)
