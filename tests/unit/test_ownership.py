"""Everything that calls have taken is given back, wherever an interrupt comes."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from nestforge import ownership
from nestforge.ownership import Owned, Owner
from nestforge.runtime import in_flight
from nestforge.runtime import model as model_module
from nestforge.runtime.engines import memory, runner
from nestforge.runtime.generation import admitted, generation, generator, session
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.interrupts import interrupt_everywhere

GENERATES = Path(__file__).parents[1] / "golden" / "bundle-fewer-heads"
PROMPT = [5, 7]
REQUEST = (ownership, in_flight, model_module)
GENERATION = (ownership, memory, runner, admitted, session, generation, generator)


def test_what_is_owned_is_what_owners_have_that_are_left() -> None:
    book = Owned[str]()
    first, second, third = Owner(), Owner(), Owner()
    for owner, what in ((first, "a"), (second, "b"), (first, "c"), (third, "d")):
        book.add(owner, what)
    assert book.of(first) == ["a", "c"]
    assert book.present() == ["a", "b", "c", "d"]
    first.is_over = True
    assert (book.of(first), book.present()) == ([], ["b", "d"])
    del second
    assert book.present() == ["d"]
    book.remove(third)
    assert book.present() == []


def test_a_book_forgets_what_is_over() -> None:
    book = Owned[int]()
    for number in range(9):
        book.add(Owner(), number)
    assert len(book._entries) == 1


@pytest.fixture(scope="module")
def model() -> Iterator[ElasticModel]:
    with load(GENERATES, threads=1, memory_mb=50) as opened:
        yield opened


@pytest.mark.parametrize("deadline_ms", [None, 1e6])
@pytest.mark.parametrize(("event", "every"), [("line", 1), ("opcode", 7)])
def test_an_interrupted_request_is_in_flight_no_more(
    model: ElasticModel, deadline_ms: float | None, event: str, every: int
) -> None:
    feeds = {"input_ids": np.ones((1, 4), np.int64)}

    def check(place: str) -> None:
        assert str(model._in_flight.load()) == "nothing in flight", place

    times = interrupt_everywhere(lambda: model(feeds, deadline_ms=deadline_ms), REQUEST, check, event, every)
    assert times > 50


@pytest.mark.parametrize(
    ("how", "event", "every"),
    [("in a session", "line", 1), ("in a session", "opcode", 13), ("streamed", "line", 3), ("alone", "line", 3)],
)
def test_an_interrupted_generation_leaves_all_that_it_took(
    model: ElasticModel, how: str, event: str, every: int
) -> None:
    held = model.session(capacity=16)
    expected = model.generate(PROMPT, session=held, max_tokens=2).rows[0].tokens
    engines, cap = model.generate._engines, model.generate._engines._memory
    left_mb = cap.left_mb

    def call() -> None:
        if how == "streamed":
            for _ in model.generate.stream(PROMPT, session=held, max_tokens=2):
                pass
        else:
            model.generate(PROMPT, session=None if how == "alone" else held, max_tokens=2)

    def check(place: str) -> None:
        assert (engines._users.present(), cap.left_mb) == ([], left_mb), place
        holder = held._holder()
        assert holder is None or holder.is_over, f"{place}: another thread would be refused"
        if event == "line":
            assert model.generate(PROMPT, session=held, max_tokens=2).rows[0].tokens == expected, place

    assert interrupt_everywhere(call, GENERATION, check, event, every) > 50
    held.close()


def test_an_interrupt_while_engines_open_counts_each_once() -> None:
    """Under a cap of memory, which refuses what it believes to have no room for."""
    with load(GENERATES, threads=1, memory_mb=50) as model:
        model.generate(PROMPT, max_tokens=1)
        engines, cap, entry = model.generate._engines, model.generate._engines._memory, model.generate._entry()

        def reopen() -> None:
            for engine in entry.engines:
                engines._close(engine.file)
                engines.get(engine)

        def check(place: str) -> None:
            reopen()
            assert cap.left_mb == pytest.approx(left_mb), place

        reopen()
        left_mb = cap.left_mb
        assert interrupt_everywhere(reopen, (ownership, memory, runner), check, every=5) > 20
