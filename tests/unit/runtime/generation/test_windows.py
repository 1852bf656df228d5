"""Sessions of a model with a window of 8 tokens in one of two layers, whose buffers have 520 places: texts that slide
are those of its whole engines."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bundle.entries.generation_entry import CachedLayer
from nestforge.runtime.generation import cache_memory
from nestforge.runtime.generation.cache import Cache, SlidingWindow
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel

GOLDEN = Path(__file__).parents[3] / "golden" / "bundle-windows"
PROMPT = np.random.default_rng(1).integers(3, 48, 505).tolist()
WHOLE, SMALL = "ffn32", "ffn8"


@pytest.fixture(scope="module")
def model() -> Iterator[ElasticModel]:
    with load(GOLDEN, threads=1) as opened:
        yield opened


def is_greedy(model: ElasticModel, prompt: list[int], answer: tuple[int, ...], submodel: str = WHOLE) -> bool:
    """Whether each token of ``answer`` is the likeliest behind the ones before, by the engine for whole texts."""
    text = np.array([[*prompt, *answer]])
    logits = model({"input_ids": text}, submodel=submodel).outputs["logits"][0]
    return bool((logits[len(prompt) - 1 : -1].argmax(axis=-1) == answer).all())


def test_a_chat_that_goes_on_reuses_all_behind_a_window_that_slid(model: ElasticModel) -> None:
    with model.session(capacity=560) as session:
        assert session.bytes == 4 * 2 * 2 * 8 * (560 + 520)
        row = model.generate(PROMPT, session=session, max_tokens=30).rows[0]
        assert is_greedy(model, PROMPT, row.tokens)
        turn = [*PROMPT, *row.tokens, 40]
        row = model.generate(turn, session=session, max_tokens=20).rows[0]
        assert row.reused_tokens == len(turn) - 2
        assert is_greedy(model, turn, row.tokens)


@pytest.mark.parametrize(("common", "reused"), [(533, 533), (520, 520), (519, 0), (100, 0)])
def test_a_text_is_reused_where_its_window_is_there(model: ElasticModel, common: int, reused: int) -> None:
    """The window slid before token 520, to begin at 513."""
    with model.session(capacity=560) as session:
        row = model.generate(PROMPT, session=session, max_tokens=30).rows[0]
        text = [*PROMPT, *row.tokens]
        edited = [*text[:common], (text[common] + 1) % 40 + 3, 44]
        row = model.generate(edited, session=session, max_tokens=9).rows[0]
        assert row.reused_tokens == reused
        assert is_greedy(model, edited, row.tokens)
        again = model.generate([*edited, *row.tokens, 5], session=session, max_tokens=9).rows[0]
        assert again.reused_tokens == len(edited) + 8
        assert is_greedy(model, [*edited, *row.tokens, 5], again.tokens)


@pytest.mark.parametrize("draft", [SMALL, "n-gram"])
@pytest.mark.parametrize("behind", [0, 3])
def test_refused_drafts_lie_behind_what_a_window_keeps(model: ElasticModel, draft: str, behind: int) -> None:
    prompt = PROMPT[behind:]
    row = model.generate(prompt, draft=draft, drafted=7, max_tokens=40, capacity=560).rows[0]
    drafted = row.drafts[0]
    assert drafted.accepted < drafted.drafted
    assert is_greedy(model, prompt, row.tokens)


def test_rows_slide_each_at_its_own_place(model: ElasticModel) -> None:
    prompts = [PROMPT[:500], PROMPT[20:40], PROMPT[:510], [7]]
    alone = [model.generate(prompt, max_tokens=40, capacity=560).rows[0].tokens for prompt in prompts]
    stops = [alone[1][5], alone[0][20]]
    with model.session(rows=4, capacity=560) as session:
        rows = model.generate(prompts, session=session, max_tokens=40, stop=stops).rows
        for row, whole in zip(rows, alone, strict=True):
            assert row.tokens == whole[: len(row.tokens)]
        assert len({len(row.tokens) for row in rows}) > 1, "some left before others"
        turns = [[*prompt, *row.tokens] for prompt, row in zip(prompts, rows, strict=True)]
        for turn, row in zip(turns, model.generate(turns, session=session, max_tokens=9).rows, strict=True):
            assert row.reused_tokens == len(turn) - 1
            assert is_greedy(model, turn, row.tokens)


def test_what_rows_begin_with_together_is_copied_with_its_window(model: ElasticModel) -> None:
    prompt = PROMPT + PROMPT[:20]
    rows = model.generate([prompt, [*prompt, 9]], max_tokens=12, capacity=560).rows
    assert [row.reused_tokens for row in rows] == [0, len(prompt)]
    assert is_greedy(model, prompt, rows[0].tokens)
    assert is_greedy(model, [*prompt, 9], rows[1].tokens)


def test_a_submodel_changes_behind_a_window_as_it_does_without(
    model: ElasticModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed() -> tuple[int, ...]:
        row = model.generate(PROMPT, max_tokens=40, tokens_per_second=1e9, capacity=560).rows[0]
        assert [run.submodel for run in row.runs] == [WHOLE, SMALL]
        return row.tokens

    slid = changed()

    def with_every_token(*given: object) -> Cache:
        return Cache.empty(*given[:4])

    with monkeypatch.context() as patch:
        patch.setattr(cache_memory, "Cache", type("Cache", (), {"empty": staticmethod(with_every_token)}))
        assert changed() == slid


FULL, SLIDING = CachedLayer(1, 8), CachedLayer(2, 8, window=5)


def written(cache: Cache, row: int, position: int, tokens: int, drafted: int = 0) -> None:
    """Steps of a run: room, and then each new token, by its number in the text, at its place."""
    cache.make_room(row, position, tokens, drafted)
    for tensor, slides in zip(cache.tensors, cache.slides, strict=True):
        at = position - (int(cache.window.starts[row]) if slides else 0)
        tensor[row, :, at : at + tokens] = np.arange(position, position + tokens)[None, :, None] + 1000 * row


def seen(cache: Cache, row: int, position: int, window: int) -> list[int]:
    """The tokens that one at ``position`` sees before itself, by what the first tensor has."""
    start = int(cache.window.starts[row])
    first = max(0, position - window + 1)
    assert start <= first
    return [int(number) - 1000 * row for number in cache.tensors[0][row, 0, first - start : position - start, 0]]


def before(position: int, window: int) -> list[int]:
    """The tokens that it must see."""
    return [*range(max(0, position - window + 1), position)]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_written_a_token_sees_its_window(seed: int) -> None:
    """Runs of any length on rows of any length, drafts that are refused, and texts that begin anew."""
    rng = np.random.default_rng(seed)
    window, run = int(rng.integers(1, 9)), int(rng.integers(2, 7))
    cache = Cache.empty([CachedLayer(1, 8, window), FULL], rows=3, capacity=100, longest_run=run)
    lengths = [0, 0, 0]
    for _ in range(120):
        row = int(rng.integers(3))
        if lengths[row] > 90 or rng.random() < 0.03:
            lengths[row] = 0
        length = lengths[row]
        for ahead in range(int(rng.integers(0, run))) if length else ():  # of a draft that is refused
            assert seen(cache, row, length, window) == before(length, window)
            written(cache, row, length + ahead, 1, drafted=ahead)
        tokens = int(rng.integers(1, run + 1))
        written(cache, row, length, tokens)
        lengths[row] += tokens
        assert seen(cache, row, lengths[row], window) == before(lengths[row], window)
    assert cache.tensors[0].shape[2] == window + run
    assert cache.tensors[2].shape[2] == 100


def test_a_row_is_continued_where_the_next_token_has_its_window() -> None:
    cache = Cache.empty([FULL, SLIDING], rows=2, capacity=50, longest_run=4)
    for position in range(20):
        written(cache, 0, position, 1)
    assert cache.window.starts.tolist() == [15, 0], "slid before tokens 9, 14 and 19, to keep 4"
    assert [cache.usable(0, tokens) for tokens in (0, 10, 18, 19, 20)] == [0, 0, 0, 19, 20]
    assert cache.usable(1, 17) == 17, "the other row has not slid"
    written(cache, 0, 0, 1)
    assert cache.window.starts.tolist() == [0, 0], "a text begins anew"


def test_rows_are_copied_and_change_places_with_where_they_begin() -> None:
    cache = Cache.empty([SLIDING], rows=3, capacity=50, longest_run=4)
    for position in range(12):
        written(cache, 0, position, 1)
    cache.copy_row(0, 1, tokens=12)
    assert seen(cache, 0, 12, 5) == before(12, 5) == [number + 1000 for number in seen(cache, 1, 12, 5)]
    cache.swap_rows(1, 2, tokens=12)
    assert before(12, 5) == [number + 2000 for number in seen(cache, 2, 12, 5)]
    assert cache.window.starts.tolist() == [5, 0, 5]
    part = cache.part(2, 3)
    assert part.window is not None
    assert part.usable(0, 12) == 12
    part.make_room(0, 0, 1)
    assert cache.window.starts.tolist() == [5, 0, 0], "on the same memory"


def test_of_a_row_that_was_being_moved_nothing_is_continued() -> None:
    class Interrupted:
        shape = (1, 1, 9, 8)

        def __setitem__(self, *_: Any) -> None:
            raise KeyboardInterrupt

        def __getitem__(self, _: Any) -> None: ...

    window, tensors = SlidingWindow(5, np.zeros(1, np.int64)), [np.zeros((1, 1, 9, 8)), Interrupted()]
    with pytest.raises(KeyboardInterrupt):
        window.make_room(tensors, 0, 9, 1)
    assert not any(window.reaches(0, position) for position in (1, 8, 9, 50))
    window.make_room(tensors, 0, 0, 9)
    assert window.reaches(0, 9)


def test_what_a_cache_takes_follows_from_its_windows() -> None:
    bytes_of = {run: Cache.empty([FULL, SLIDING], 3, 50, longest_run=run).bytes for run in (None, 4, 45, 500)}
    every_token = 4 * 2 * 3 * 50 * (8 + 16)
    assert bytes_of == {None: every_token, 4: 4 * 2 * 3 * (50 * 8 + 9 * 16), 45: every_token, 500: every_token}
    caches = {run: Cache.empty([FULL, SLIDING], 3, 50, longest_run=run) for run in (None, 4, 45, 500)}
    assert {run: cache.longest_run for run, cache in caches.items()} == {None: 50, 4: 4, 45: 50, 500: 50}
