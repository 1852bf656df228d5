"""Places, batches and turns of texts that several clients ask for at once, of a model in this process."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.errors import OverloadError
from nestforge.runtime.generation.draft_gains import StepTimes
from nestforge.runtime.generation.options import GenerationRequest
from nestforge.runtime.generation.row import GeneratedRow
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from nestforge.serving import generating as room
from nestforge.serving.desk import Desk
from nestforge.serving.generating import Generating, Generation
from nestforge.serving.scheduler import Job
from nestforge.serving.served import Terms
from support.generating import llama_folder


class Noted(Desk):
    """A desk that knows what it was asked."""

    def __init__(self) -> None:
        super().__init__(1, 512)
        self.jobs: list[Job] = []

    def answer(self, served: Any, work: Any, job: Job) -> asyncio.Future[Any]:
        self.jobs.append(job)
        return super().answer(served, work, job)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticModel]:
    with load(llama_folder(tmp_path_factory) / "bundle") as opened:
        yield opened


@pytest.fixture
def desk() -> Iterator[Noted]:
    found = Noted()
    yield found
    found.close()


@pytest.fixture
def generating(model: ElasticModel, desk: Noted) -> Generating:
    return Generating(model.generate, desk)


def request(texts: Sequence[str], tokens: int) -> GenerationRequest:
    return GenerationRequest(list(texts), max_tokens=tokens)


async def begin(
    of: Generating, client: str, texts: Sequence[str], tokens: int, deadline_ms: float | None = None, **choice: Any
) -> Generation:
    terms = Terms(client, room.now_ms(), 30_000.0, deadline_ms)
    return await of.begin(request(texts, tokens), 1, choice, terms)


async def ended(generation: Generation) -> list[GeneratedRow]:
    async for _ in generation.each():
        pass
    return [row.result() for row in generation.rows]


def test_long_rows_of_one_client_make_place_for_those_of_others_and_go_on(
    model: ElasticModel, generating: Generating
) -> None:
    long, short = [f"class method {n}" for n in range(8)], ["the", "a", "def", "return", "if"]
    order = []

    async def one(name: str, texts: Sequence[str], tokens: int) -> list[GeneratedRow]:
        found = await ended(await begin(generating, name, texts, tokens))
        order.append(name)
        return found

    async def ask() -> list[list[GeneratedRow]]:
        flood = asyncio.ensure_future(one("flood", long, 120))
        while generating.rows < 8:
            await asyncio.sleep(0)
        return await asyncio.gather(flood, one("b", short, 9), one("c", short[:1], 9))

    found = asyncio.run(ask())
    assert order[-1] == "flood"
    for rows, texts, tokens in zip(found, (long, short, short[:1]), (120, 9, 9), strict=True):
        for row, text in zip(rows, texts, strict=True):
            assert row.text == model.generate(text, max_tokens=tokens).text
            assert [run.reason for run in row.runs] == ["no limit given: the largest submodel"]


def test_no_row_makes_place_for_a_client_that_has_none_waiting(generating: Generating, desk: Noted) -> None:
    async def ask() -> None:
        both = [await begin(generating, *one, 30) for one in (("other", ["the"]), ("flood", ["class"] * 12))]
        await asyncio.gather(*map(ended, both))

    asyncio.run(ask())
    assert sum(job.rows == 1 and job.steps > 1 for job in desk.jobs) == 13, "each is read once"


def test_a_choice_is_by_the_engines_that_it_leaves(generating: Generating) -> None:
    choices: list[dict[str, Any]] = [{"memory_mb": 1000.0 + n} for n in range(8)]
    choices += [{}, {"submodel": "XL"}, {"submodel": "ffn32"}]

    async def ask() -> list[list[GeneratedRow]]:
        return await asyncio.gather(
            *[ended(await begin(generating, "a", ["class"], 30, **choice)) for choice in choices]
        )

    rows = [row for (row,) in asyncio.run(ask())]
    assert len({row.text for row in rows}) == 1
    assert rows[0].runs[0].reason.endswith(" MB <= 1000 MB"), "why is each one's own"
    assert rows[-1].runs[0].reason == "submodel ffn32 requested"


def test_the_last_batch_is_for_a_client_that_has_none(generating: Generating) -> None:
    async def ask() -> None:
        own = [await begin(generating, "flood", ["a"], 60, submodel=name) for name in ("S", "M", "L")]
        with pytest.raises(OverloadError, match="submodels of other requests generate"):
            await begin(generating, "flood", ["a"], 60, submodel="XL")
        own.append(await begin(generating, "other", ["a"], 60, submodel="XL"))
        with pytest.raises(OverloadError, match="submodels of other requests generate"):
            await begin(generating, "third", ["a"], 60, deadline_ms=60_000.0)
        await asyncio.gather(*map(ended, own))
        await ended(await begin(generating, "third", ["a"], 5, deadline_ms=60_000.0))

    asyncio.run(ask())


def test_texts_that_wait_are_shared_by_clients(generating: Generating) -> None:
    async def ask() -> None:
        own = []
        for client, requests in (("flood", 8), ("other", 6)):  # a half of 256 texts, and a third
            for _ in range(requests):
                own.append(await begin(generating, client, ["a"] * 16, 100))
            with pytest.raises(OverloadError, match=f"texts wait, {16 * requests} of this client; ask again later"):
                await begin(generating, client, ["a"], 100)
        for one in own:
            one.close()

    asyncio.run(ask())


def test_texts_of_a_request_wait_for_one_another_as_long_as_it_goes_on(
    generating: Generating, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def ticking() -> float:
        clock[0] += 500.0
        return clock[0]

    monkeypatch.setattr("nestforge.serving.generating.now_ms", ticking)
    monkeypatch.setattr("nestforge.serving.desk.now_ms", lambda: clock[0])

    async def ask() -> list[GeneratedRow]:
        terms = Terms("a", ticking(), 30_000.0, None)
        return await ended(await generating.begin(request(["class"] * 20, 30), 1, {}, terms))

    assert [len(row.tokens) for row in asyncio.run(ask())] == [30] * 20
    assert clock[0] > 60_000.0, "the last ones waited for longer than one request is patient"


def test_steps_and_parts_of_prompts_run_soon_whatever_waits(generating: Generating, desk: Noted) -> None:
    prompt = "class method " * 28
    asyncio.run(_all(generating, prompt, None))
    assert len(desk.jobs) == 2 + 4, "parts of a prompt, and steps behind the first token"
    for job in desk.jobs:
        assert job.continues
        assert job.within == pytest.approx(4 * min(one.p95_ms for one in job.alone))
        assert job.due - job.arrived == pytest.approx(30_000.0)


def test_parts_of_a_prompt_and_steps_share_a_deadline_and_smaller_submodels_keep_it(
    generating: Generating, desk: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no time passes: a token of a prompt takes 10 ms, a step 320 by the largest submodel, a quarter of that by
    the smallest."""

    def part(engine: EngineEntry) -> float:
        return int(engine.submodel[3:]) / 32

    for where in ("generating", "desk"):
        monkeypatch.setattr(f"nestforge.serving.{where}.now_ms", lambda: 0.0)
    monkeypatch.setattr("nestforge.runtime.generation.batch.MOST_READ", 16)
    monkeypatch.setattr(StepTimes, "expected_ms", lambda _, engine, rows: 320 * part(engine) * rows)
    monkeypatch.setattr(StepTimes, "expected_prompt_ms", lambda _, engine, tokens: 10 * part(engine) * tokens)
    (row,) = asyncio.run(_all(generating, "class method " * 16, 1000.0))
    left = 1000.0 - 4 * 80
    first, *parts = desk.jobs[:-4]
    rest = [row.prompt_tokens - 16 * n for n in range(1, len(parts) + 1)]
    assert (first.due, first.continues, first.alone[-1].p95_ms) == (left, False, 2.5 * row.prompt_tokens)
    assert [one.due for one in parts] == pytest.approx([left * min(16, n) / n for n in rest])
    assert [one.alone[-1].p95_ms for one in parts] == [2.5 * min(16, n) for n in rest]
    assert [one.due for one in desk.jobs[-4:]] == pytest.approx([1000 / n for n in (4, 3, 2, 1)])
    assert [(run.submodel, run.tokens) for run in row.runs][1:] == [("ffn24", 1), ("ffn32", 3)]


async def _all(generating: Generating, prompt: str, deadline_ms: float | None) -> list[GeneratedRow]:
    return await ended(await begin(generating, "a", [prompt], 5, deadline_ms))
