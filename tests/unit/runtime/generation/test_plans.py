"""Text from plans of TensorRT, on tests/support/fake_tensorrt.py: no plan is really run. Its caches lie in memory that
plays a GPU's, of which nothing may stay; what is written must be what the processor's engines write."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nestforge.errors import BundleError, BundleIncompatibleError, InputError, SelectionError
from nestforge.runtime.generation.cached_engine import CachedEngine
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.fake_cuda import World
from support.generating import (
    NARROW,
    SAME_HEADS,
    WHOLE,
    generating_folder,
    opened_plans,
    played_gpu,
    require_same,
)

SHORT, LONG = [5, 7, 9], list(range(20, 32))
# Longer than any step, so that it is read in a run of its own kind.
FULL = list(range(12, 34))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generating_folder(tmp_path_factory)


@pytest.fixture(scope="module")
def processor(folder: Path) -> Iterator[ElasticModel]:
    with load(folder / "processor", threads=1) as model:
        yield model


@pytest.fixture
def plans(folder: Path) -> Iterator[tuple[ElasticModel, World]]:
    with opened_plans(folder) as found:
        yield found


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("submodel", [WHOLE, SAME_HEADS, NARROW])
def test_the_same_tokens_as_on_the_processor(
    folder: Path, processor: ElasticModel, submodel: str, captures: bool
) -> None:
    with opened_plans(folder, captures=captures) as (model, world):
        for prompt, tokens in ((SHORT, 30), (FULL, 6), ([SHORT, LONG, FULL], 12)):
            asked: dict[str, Any] = {"prompt": prompt, "submodel": submodel, "max_tokens": tokens, "logprobs": 0}
            require_same(model.generate(**asked), processor.generate(**asked))
    assert ("graph" in world.calls) == captures


def test_a_text_moves_to_a_larger_cache_only_when_it_must(plans: tuple[ElasticModel, World]) -> None:
    model, world = plans
    session = model.session(capacity=40)
    small = session.bytes
    model.generate(SHORT, session=session, max_tokens=13)
    assert (session.bytes, world.calls.count("open")) == (small, 1)
    assert not [call for call in world.calls if call.startswith("copy")]
    model.generate([*SHORT, *session.tokens()[3:], 50], session=session, max_tokens=2)
    assert (session.bytes, world.calls.count("open")) == (small * 40 // 16, 2)
    assert [call for call in world.calls if call.startswith("copy")] == ["copy 4"] * 4, "keys and values of two layers"
    assert len(session.tokens()) == 17
    session.close()


def test_rows_leave_and_return_in_a_session(plans: tuple[ElasticModel, World], processor: ElasticModel) -> None:
    model, _ = plans
    prompts = [[5, 7, 9], [20, 21], [30, 31, 32]]
    stop = list(processor.generate(prompts[0], max_tokens=1).rows[0].tokens)
    mine, known = model.session(rows=3, capacity=40), processor.session(rows=3, capacity=40)
    for _ in range(2):
        asked: dict[str, Any] = {"prompt": prompts, "max_tokens": 7, "stop": stop, "logprobs": 0}
        found, expected = model.generate(session=mine, **asked), processor.generate(session=known, **asked)
        require_same(found, expected)
        assert [mine.tokens(row) for row in range(3)] == [known.tokens(row) for row in range(3)]
        prompts = [[*prompt, *row.tokens, 50] for prompt, row in zip(prompts, found.rows, strict=True)]
    mine.close()


@pytest.mark.parametrize("draft", [SAME_HEADS, NARROW, "n-gram", "auto"])
def test_drafted_tokens_are_judged_and_overwritten(
    plans: tuple[ElasticModel, World], processor: ElasticModel, draft: str
) -> None:
    model, _ = plans
    drafted = {} if draft == "auto" else {"drafted": 4}
    found = model.generate([*LONG, *LONG[:4]], draft=draft, max_tokens=20, **drafted).rows[0]
    assert found.tokens == processor.generate([*LONG, *LONG[:4]], max_tokens=20).rows[0].tokens


def test_another_submodel_continues_the_cache(plans: tuple[ElasticModel, World], processor: ElasticModel) -> None:
    found = []
    for model in (plans[0], processor):
        entry = model.bundle.manifest.generation
        of = {engine.submodel: engine for engine in entry.generators}
        with model.session(capacity=40) as session:
            session.arrange(1, 13)
            session.prefill(0, model.generate._prompts(entry).tokens(LONG, None)[0], of[WHOLE], 1)
            logits = []
            for writer in (WHOLE, NARROW, SAME_HEADS, NARROW, NARROW, WHOLE):
                logits.append(session.step([int(logits[-1].argmax()) if logits else 5], of[writer]).copy())
            found.append([int(row.argmax()) for row in logits])
    assert found[0] == found[1]


def test_a_text_that_is_interrupted_leaves_what_was_written(
    plans: tuple[ElasticModel, World], processor: ElasticModel
) -> None:
    model, _ = plans
    expected = processor.generate(SHORT, max_tokens=20).rows[0].tokens
    with model.session(capacity=40) as session:
        with model.generate.stream(SHORT, session=session, max_tokens=20) as generation:
            pieces = [piece.token for piece, _ in zip(generation, range(15), strict=False)]
        assert tuple(pieces) == expected[:15]
        again = model.generate(SHORT, session=session, max_tokens=20).rows[0]
        assert (again.reused_tokens, again.tokens) == (2, expected)


def test_an_interrupted_move_to_a_larger_cache_leaves_a_session_whole(
    plans: tuple[ElasticModel, World], processor: ElasticModel, interrupt_once: Any
) -> None:
    model, world = plans
    model.generate(SHORT, max_tokens=20)  # opens the plans of both capacities
    taken, session = set(world.allocated), model.session(capacity=40)
    model.generate(SHORT, session=session, max_tokens=13)
    text = [*SHORT, *session.tokens()[3:], 50]
    # Tokens were copied, and what was moved from is about to go.
    interrupt_once(world, lambda calls: calls[-4:] == ["copy 4"] * 4)
    with pytest.raises(KeyboardInterrupt):
        model.generate(text, session=session, max_tokens=4)
    again = model.generate(text, session=session, max_tokens=4).rows[0]
    assert (again.reused_tokens, again.tokens) == (15, processor.generate(text, max_tokens=4).rows[0].tokens)
    assert session.bytes == 40 * 2 * 2 * 4 * 32
    session.close()
    assert set(world.allocated) == taken


def test_a_session_that_nobody_has_gives_its_memory_back(plans: tuple[ElasticModel, World]) -> None:
    model, world = plans
    model.generate(SHORT, max_tokens=2)
    taken = len(world.allocated)
    session = model.session()
    assert len(world.allocated) > taken
    del session
    gc.collect()
    assert len(world.allocated) == taken


def test_too_little_memory_is_one_line(plans: tuple[ElasticModel, World]) -> None:
    model, world = plans
    with model.session(rows=2, capacity=40) as session:
        model.generate(SHORT, session=session, max_tokens=2)
        written = session.tokens()
        world.free = 5000
        line = r"^CUDA: allocating \d+ bytes: out of memory; close other"
        with pytest.raises(BundleIncompatibleError, match=line):
            model.generate(FULL, session=session, max_tokens=2)
        with pytest.raises(BundleIncompatibleError, match=line):
            model.session(rows=64)
        world.free = 10**9
        assert session.tokens() == written
        assert model.generate([*written, 7], session=session, max_tokens=2).rows[0].reused_tokens == len(written)


def test_a_limit_counts_what_a_session_may_grow_to(plans: tuple[ElasticModel, World]) -> None:
    model, _ = plans
    with model.session(rows=64, capacity=40) as session:
        assert session.bytes == 64 * 16 * 2 * 2 * 4 * 32
        # Room for 40 tokens, and for the 16 that move there.
        with pytest.raises(SelectionError, match=r"with its cache of 1\.8 MB$"):
            model.generate(SHORT, session=session, memory_mb=0.1, max_tokens=2)


def test_a_session_stays_usable_where_its_engines_do_not_close(
    plans: tuple[ElasticModel, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = plans

    def fails(*_: object) -> None:
        raise BundleError("CUDA: running the engine: gone")

    with model.session(capacity=40) as session:
        with monkeypatch.context() as patch:
            patch.setattr(CachedEngine, "close", fails)
            with pytest.raises(BundleError, match="gone"):
                model.generate(SHORT, session=session, max_tokens=2)
        assert len(model.generate(SHORT, session=session, max_tokens=2).rows[0].tokens) == 2


def test_a_cap_counts_the_plans_of_every_capacity(folder: Path) -> None:
    with played_gpu(folder), load(folder / "plans", threads=1, memory_mb=0.7) as model:
        generation = model.bundle.manifest.generation
        admitted = model.generate._engines.admit(generation, 0)
        of = {engine.submodel for engine in generation.engines if engine.id in admitted}
        assert {engine.id for engine in generation.engines if engine.submodel in of} == admitted
        with pytest.raises(SelectionError, match=r"memory_mb=0.7: a cache and buffers of"):
            model.session(rows=64, capacity=40)


def test_what_does_not_fit_is_refused_in_one_line(plans: tuple[ElasticModel, World], folder: Path) -> None:
    model, _ = plans
    with pytest.raises(InputError, match=r"^capacity: expected at most 40, the tokens of its largest cache, got 41$"):
        model.generate(SHORT, capacity=41)
    with pytest.raises(InputError, match="more than the 40 tokens of its largest cache; shorten the prompt"):
        model.generate(LONG, max_tokens=29)
    assert model.session().capacity == 40
    with pytest.raises(InputError, match=r"^rows: expected at most 64"):
        model.session(rows=65)


def test_a_bundle_without_plans_says_what_to_do(folder: Path) -> None:
    with played_gpu(folder) as world, load(folder / "graphs", threads=1) as model:
        with pytest.raises(BundleIncompatibleError) as raised:
            model.generate(SHORT, max_tokens=2)
        assert str(raised.value) == (
            f"engine {WHOLE}.cached16@b1_64-s1_16: has no plan yet; run `nestforge build {folder / 'graphs'}` on this "
            "device"
        )
        assert world.calls == []


def test_another_gpu_or_release_does_not_run_them(folder: Path) -> None:
    with opened_plans(folder, gpu="Other GPU") as (model, _), pytest.raises(BundleIncompatibleError, match="Other GPU"):
        model.generate(SHORT, max_tokens=2)
