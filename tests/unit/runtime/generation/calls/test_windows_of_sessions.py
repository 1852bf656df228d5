"""Sessions of a model with a window of 8 tokens in one of two layers, whose buffers have 520 places: texts that slide
are those of its whole engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from nestforge.runtime.generation.cache import Cache
from nestforge.runtime.generation.calls import session as session_module
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel

GOLDEN = Path(__file__).parents[4] / "golden" / "bundle-windows"
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
        return Cache.empty(*given[:4])  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(session_module, "Cache", type("Cache", (), {"empty": staticmethod(with_every_token)}))
        assert changed() == slid
