"""Rows that join others between their steps, and leave them, beside the rows of a call alone."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from nestforge.errors import InputError, SelectionError
from nestforge.runtime.generation.batch import Batch
from nestforge.runtime.generation.options import GenerationRequest
from nestforge.runtime.generation.row import Piece, Row
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel

GOLDEN = Path(__file__).parents[3] / "golden"


def row(model: ElasticModel, prompt: Sequence[int], tokens: int, most: int = 64) -> Row:
    (found,) = model.generate.rows(GenerationRequest([list(prompt)], max_tokens=tokens), most)
    return found


def expected(model: ElasticModel, prompt: Sequence[int], tokens: int, submodel: str | None = None) -> Sequence[int]:
    return model.generate([list(prompt)], max_tokens=tokens, submodel=submodel).rows[0].tokens


def join(batch: Batch, one: Row) -> Piece | None:
    return batch.join(one, batch.engines[0], "")


@pytest.mark.parametrize("bundle", ["llama", "elastic heads", "encoder-decoder"])
@pytest.mark.parametrize("submodel", [None, "smallest"])
def test_rows_come_and_go_between_steps(llama_bundle: Path, bundle: str, submodel: str | None) -> None:
    golden = {"elastic heads": GOLDEN / "bundle-fewer-heads", "encoder-decoder": GOLDEN / "bundle-narrow-heads"}
    with load(golden.get(bundle, llama_bundle), threads=1) as of:
        named = None if submodel is None else of.bundle.manifest.largest_first[-1].id
        batch = of.generate.batch(GenerationRequest(submodel=named), 3, 24)
        prompts = {n: [5 + n, 7, 9][: 1 + n % 3] for n in range(6)}
        lengths = {0: 9, 1: 2, 2: 5, 3: 1, 4: 7, 5: 4}
        rows = {n: row(of, prompts[n], lengths[n], 24) for n in prompts}
        waiting, steps = list(rows.values()), 0
        while waiting or batch.rows:
            if waiting and len(batch.rows) < 3:
                join(batch, waiting.pop(0))
            held = [batch.session._tokens.at(place) for place in range(len(batch.rows))]
            assert held == [tuple(one.tokens[:-1].tolist()) for one in batch.rows], "no row loses its keys"
            if batch.rows:
                steps += 1
                batch.step(batch.engines[0], "")
            if steps == 2:  # one goes on later
                waiting.append(batch.rows[0])
                batch.leave(batch.rows[0])
        for n, one in rows.items():
            assert one.result().tokens == expected(of, prompts[n], lengths[n], named)
            assert [run.tokens for run in one.result().runs] == [lengths[n]], "one reason, whoever read it again"
        assert steps < sum(lengths.values()) - len(lengths), "rows stepped together"
        batch.close()


def test_a_row_leaves_its_place_and_goes_on_later(model: ElasticModel) -> None:
    batch = model.generate.batch(GenerationRequest(), 2, 64)
    gone, stays, later = row(model, [5, 7], 20), row(model, [8], 20), row(model, [5, 7, 9], 20)
    join(batch, gone)
    join(batch, stays)
    batch.step(batch.engines[0], "")
    batch.leave(gone)
    batch.leave(gone)
    assert batch.rows == [stays]
    join(batch, later)
    assert later.reused_tokens == 2, "of the row that left"
    batch.leave(stays)
    batch.step(batch.engines[0], "")
    join(batch, stays)
    while batch.rows:
        batch.step(batch.engines[0], "")
    assert stays.result().tokens == expected(model, [8], 20)
    assert later.result().tokens == expected(model, [5, 7, 9], 20)
    assert gone.finish is None
    batch.close()


def test_a_long_prompt_is_read_in_parts_between_which_others_step_and_leave(
    model: ElasticModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestforge.runtime.generation.batch.MOST_READ", 5)
    batch = model.generate.batch(GenerationRequest(), 3, 64)
    first, second, long = row(model, [8], 4), row(model, [9, 3], 9), row(model, list(range(3, 25)), 6)
    join(batch, first)
    join(batch, second)
    parts = 0
    while join(batch, long) is None:
        parts += 1
        assert [ms for _, ms in batch.to_read(long, 5)] <= [ms for _, ms in batch.to_read(long)]
        batch.step(batch.engines[0], "")
    assert parts == 4
    assert first.finish == "length", "it left while the prompt was read"
    while batch.rows:
        batch.step(batch.engines[0], "")
    for one, prompt, tokens in ((first, [8], 4), (second, [9, 3], 9), (long, list(range(3, 25)), 6)):
        assert one.result().tokens == expected(model, prompt, tokens)
    assert long.reused_tokens == 0
    batch.close()


def test_the_submodel_of_each_step_is_the_callers(model: ElasticModel) -> None:
    batch = model.generate.batch(GenerationRequest(deadline_ms=1.0), 2, 64)
    large, *_, small = batch.engines
    assert [engine for engine, _ in batch.to_step(2)] == list(batch.engines)
    one = row(model, [5, 7], 6)
    assert [ms >= 0 for _, ms in batch.to_read(one)] == [True] * 4
    batch.join(one, small, "first")
    for engine, reason in ((small, "still"), (small, "still"), (large, "now"), (small, "again")):
        batch.step(engine, reason)
    assert [(run.submodel, run.tokens, run.reason) for run in one.result().runs] == [
        ("ffn8", 3, "first"),
        ("ffn32", 1, "now"),
        ("ffn8", 1, "again"),
    ]
    batch.close()


def test_what_does_not_fit_is_refused_before_any_work(model: ElasticModel) -> None:
    with pytest.raises(InputError, match="more than the capacity of 64"):
        row(model, [5] * 60, 9)
    with pytest.raises(SelectionError, match="no submodel 'no'"):
        model.generate.batch(GenerationRequest(submodel="no"), 2, 64)


def test_its_memory_counts_until_it_is_closed(llama_bundle: Path) -> None:
    with load(llama_bundle, threads=1, memory_mb=7) as capped:
        for _ in range(20):
            batch = capped.generate.batch(GenerationRequest(), 64, 256)
            with pytest.raises(SelectionError, match="memory_mb=7"):
                capped.generate.batch(GenerationRequest(), 64, 256)
            batch.close()
