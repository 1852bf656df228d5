"""Cases of the gate: inputs, texts, and the pieces in which KV-cache engines get them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.bundle.entries.generation_entry import CachedLayer, GenerationEntry
from nestforge.bundle.entries.tensor_spec import RowNeed, TensorSpec
from nestforge.compiler.parity import cases
from nestforge.compiler.parity import cases as cases_module
from nestforge.compiler.parity.cached_cases import (
    cached_batches,
    cases_of,
    judged_specs,
    unproven_window,
)
from nestforge.compiler.parity.cases import Case, few, judged_places, parity_cases, shapes_to_prove, unjudged
from nestforge.exporters.parts import MOST_NEW_TOKENS
from nestforge.exporters.signature import Signature
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from nestforge.runtime.inputs.arrays import InputChecker


@pytest.fixture
def model(tiniest: Path) -> UniversalModel:
    return load_universal(open_source(tiniest))


@pytest.mark.parametrize("bucket", [Bucket(1, 2), Bucket(1, 3), Bucket(5, 16), Bucket(7, 2)], ids=lambda b: b.label)
def test_every_case_is_a_request_that_fills_its_bucket(model: UniversalModel, bucket: Bucket) -> None:
    signature = model.source.signature
    cases = parity_cases(signature, bucket, model.source.encoder)
    assert [case.name for case in cases] == ["random-0", "random-1", "whole", "padded", "text"]
    for case in cases:
        assert list(case.feeds) == [spec.name for spec in signature.inputs], (
            "reference and engine take them by position"
        )
        checker = InputChecker(signature.inputs)
        rows = bucket.batch - 1 if case.name == "padded" and bucket.batch > 1 else bucket.batch
        assert checker.shape_of(case.request) == Bucket(rows, bucket.sequence)
        filled = checker.filled(case.request, bucket)
        assert all(np.array_equal(array, filled[name]) for name, array in case.feeds.items()), "as the runtime fills it"


def test_masks_are_what_the_names_say(model: UniversalModel) -> None:
    cases = {c.name: c.feeds for c in parity_cases(model.source.signature, Bucket(3, 12), model.source.encoder)}
    assert cases["whole"]["attention_mask"].all()
    holes = cases["random-0"]["attention_mask"]
    assert (np.diff(holes, axis=1) > 0).any(), "a mask that is 0 and then 1 again"
    padded = cases["padded"]
    # a third of the first row, less of the second, and the third is not there
    assert padded["attention_mask"].sum(1).tolist() == [8, 9, 0]
    for row, length in enumerate([8, 9, 0]):
        assert padded["attention_mask"][row, :length].all()
        assert not padded["input_ids"][row, length:].any()
    assert not np.array_equal(cases["random-0"]["input_ids"], cases["random-1"]["input_ids"])
    assert {0, 1} == set(cases["random-0"]["token_type_ids"].flatten())


@given(st.integers(1, 6), st.integers(1, 9), st.sampled_from(["token", "first_token"]))
def test_every_row_of_a_mask_has_what_it_needs_and_hides_something(batch: int, sequence: int, need: RowNeed) -> None:
    tokens = ("batch", "sequence")
    ids, mask = (TensorSpec(name, "int64", tokens, pad=0, high=2) for name in ("ids", "mask"))
    inputs = (ids, replace(mask, row_needs=need))
    signature = Signature(inputs, (TensorSpec("y", "float32", tokens),), 9, "mask")
    cases = {case.name: case for case in parity_cases(signature, Bucket(batch, sequence), None)}
    for case in cases.values():
        assert InputChecker(inputs).shape_of(case.request).sequence == sequence
    for name in ("random-0", "random-1"):
        hides = (cases[name].feeds["mask"] == 0).any(axis=1)
        assert hides.all() == (sequence > 1)


def test_text_is_read_by_the_models_own_tokenizer(model: UniversalModel) -> None:
    feeds = parity_cases(model.source.signature, Bucket(2, 16), model.source.encoder)[-1].feeds
    assert feeds["input_ids"][:, 0].tolist() == [2, 2], "every row begins with [CLS]"
    assert feeds["input_ids"][0, :5].tolist() == [2, 4, 6, 7, 8], "[CLS] the quick brown fox"
    assert feeds["attention_mask"].sum() == (feeds["input_ids"] != 0).sum()


def test_cases_are_the_same_every_time(model: UniversalModel) -> None:
    once, again = (parity_cases(model.source.signature, Bucket(2, 8), model.source.encoder) for _ in range(2))
    for one, other in zip(once, again, strict=True):
        assert all(np.array_equal(array, other.feeds[name]) for name, array in one.feeds.items())


@pytest.mark.parametrize(
    ("pad", "batch", "names"),
    [
        (None, 2, ["random-0", "random-1"]),
        (0, 1, ["random-0", "random-1"]),
        (0, 2, ["random-0", "random-1", "padded"]),
    ],
)
def test_a_model_of_images_has_no_text_and_no_length(pad: int | None, batch: int, names: list[str]) -> None:
    pixels = TensorSpec("pixels", "float32", ("batch", 3, 4), pad=pad)
    signature = Signature((pixels,), (TensorSpec("y", "float32", ("batch",)),))
    cases = parity_cases(signature, Bucket(batch, 1), None)
    assert [case.name for case in cases] == names
    assert all(case.feeds["pixels"].shape == (batch, 3, 4) for case in cases)
    if "padded" in names:
        rows = cases[-1].feeds["pixels"]
        assert rows[0].all()
        assert not rows[1].any(), "a request of one image, filled up"


def test_a_range_is_proven_at_its_ends_and_all_over() -> None:
    shapes = shapes_to_prove(Bucket(8, 512, 1, 1))
    assert {Bucket(1, 1), Bucket(1, 512), Bucket(8, 1), Bucket(8, 64)} <= set(shapes)
    assert {Bucket(1, 2**power) for power in range(10)} <= set(shapes)
    assert all(1 <= shape.batch <= 8 and 1 <= shape.sequence <= 512 for shape in shapes)
    assert shapes == shapes_to_prove(Bucket(8, 512, 1, 1))
    assert len({shape.batch for shape in shapes}) >= 3


@pytest.mark.parametrize("bucket", [Bucket(8, 512, 1, 1), Bucket(128, 512, 1, 1), Bucket(1, 2048, 1, 1)])
def test_a_large_model_is_proven_at_the_longest_sequence_too(bucket: Bucket) -> None:
    """Where a window or a table of positions that ends too early shows, which short rows do not have."""
    shapes, every = shapes_to_prove(bucket, True), shapes_to_prove(bucket)
    assert Bucket(1, bucket.sequence) in shapes
    assert Bucket(1, 1) in shapes
    assert shapes[-1] == every[-1]
    assert set(shapes) < set(every)


def test_the_positions_that_are_judged_are_those_of_the_filled_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference answers all of its rows, the runtime those of the request."""
    monkeypatch.setattr(cases_module, "MOST_JUDGED", 2 * 4 * 20)
    case = Case("padded", {"input_ids": np.zeros((2, 64), np.int64)}, rows=1, picks=True)
    specs = [TensorSpec("logits", "float32", ("batch", "sequence", 4))]
    logits = np.arange(2 * 64 * 4.0).reshape(2, 64, 4)
    reference, answered = case.read({"logits": logits}, specs), case.judged({"logits": logits[:1]}, specs)
    assert answered["logits"].shape == (1, 20, 4)
    assert np.array_equal(reference["logits"], answered["logits"])


def test_without_a_mask_nothing_is_compared_behind_the_end_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases_module, "MOST_JUDGED", 4 * 20)
    ids = TensorSpec("input_ids", "int64", ("batch", "sequence"), high=50, pad=0)
    outputs = [TensorSpec("logits", "float32", ("batch", "sequence", 4)), TensorSpec("pooled", "float32", ("batch", 4))]
    signature = Signature((ids,), tuple(outputs))
    assert signature.mask is None
    cases = {case.name: case for case in parity_cases(signature, Bucket(1, 30), None)}
    numbers = {"logits": np.ones((1, 30, 4)), "pooled": np.ones((1, 4))}
    read = {name: case.read(numbers, outputs) for name, case in cases.items()}
    places = cases_module.judged_places(30, 4)
    assert np.array_equal(read["padded"]["logits"][0, :, 0], [place < 20 for place in places])
    assert read["whole"]["logits"].all()
    assert all(found["pooled"].all() for found in read.values())
    again = cases["padded"].read(read["padded"], outputs)
    assert np.array_equal(again["logits"], read["padded"]["logits"]), "of what was read already the same"


def test_few_cases_are_the_smaller_ones_and_the_largest_that_is_not_long(model: UniversalModel) -> None:
    signature, encoder = model.source.signature, model.source.encoder
    static = parity_cases(signature, Bucket(2, 8), encoder)
    assert few(static) == [0, 1, 2, 3, 4]
    cases = parity_cases(signature, Bucket(4, 64, 1, 1), encoder)
    kept, sizes = few(cases), sorted(case.tokens for case in cases)
    assert len(cases) > 12
    assert sizes[-1] == 256
    assert kept == sorted(kept)
    assert sorted(cases[number].tokens for number in kept) == [*sizes[:8], max(s for s in sizes if s <= 128)]


def entry(positions: int, window: int | None = None, vocabulary: int = 50) -> GenerationEntry:
    layers = (CachedLayer(2, 8), CachedLayer(2, 8, window))
    return GenerationEntry(vocabulary, layers, positions, (), ())


def test_texts_are_given_whole_in_pieces_token_by_token_and_in_rows() -> None:
    batches = cached_batches(entry(4096), long=True)
    assert [len(batch) for batch in batches] == [1, 1, 1, 3, 1]
    whole, pieces, steps, rows, longest = batches
    assert whole[0].pieces == (48,)
    assert sum(pieces[0].pieces) == 48
    assert len(set(pieces[0].pieces)) > 3
    assert max(pieces[0].pieces) <= 8
    assert steps[0].pieces == (16, *[1] * 32)
    assert [row.pieces for row in rows] == [(36, *[1] * 12), (9, *[1] * 12), (1, *[1] * 12)]
    assert longest[0].pieces[0] > MOST_NEW_TOKENS, "more than one run"
    assert len(cached_batches(entry(4096), long=False)) == 4


@pytest.mark.parametrize(
    ("made", "longest", "name", "unproven"),
    [
        (entry(4096), 521, "longer than a run", None),
        (entry(4096, window=3), 521, "longer than a run", None),
        (entry(4096, window=512), 536, "longer than the window", None),
        (entry(4096, window=1024), 1048, "longer than the window", None),
        (entry(4096, window=4095), 521, "longer than a run", "no text was longer than its window of 4095 tokens"),
        (
            entry(4096, window=1024, vocabulary=300_000),
            521,
            "longer than a run",
            "no text was longer than its window of 1024 tokens",
        ),
        (entry(100, window=60), 84, "longer than the window", None),
        (entry(100, window=90), 95, "longer than the window", None),
        (entry(100, window=97), 48, "whole", "no text was longer than its window of 97 tokens"),
        (entry(100), 48, "whole", None),
    ],
)
def test_a_text_is_longer_than_the_window_where_that_is_affordable(
    made: GenerationEntry, longest: int, name: str, unproven: str | None
) -> None:
    batches = cached_batches(made, long=True)
    case = max(cases_of(batches), key=lambda case: case.feeds["input_ids"].shape[1])
    assert (case.name, case.feeds["input_ids"].shape[1]) == (name, longest)
    assert unproven_window(made, batches) == unproven


@pytest.mark.parametrize("positions", [2, 3, 7, 40, 60, 600])
def test_no_text_is_longer_than_the_model_takes(positions: int) -> None:
    batches = cached_batches(entry(positions), long=True)
    for batch in batches:
        for row in batch:
            assert sum(row.pieces) == len(row.ids) <= positions
            assert min(row.pieces) >= 1
            assert set(row.ids) <= set(range(50))
    names = [case.name for case in cases_of(batches)]
    assert len(names) == len(set(names))


def test_of_a_long_text_and_many_words_some_logits_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """All where they are not too many; else half are the last ones, where a run ends and steps are taken."""
    assert judged_places(521, 8_000) == range(521)
    few = judged_places(521, 65_536)
    assert (len(few), few[0], few[-32:]) == (64, 0, [*range(489, 521)])
    assert list(few) == sorted(set(few))
    assert max(np.diff(few)) <= 16
    assert len(judged_places(521, 2**20)) == 16
    batches = cached_batches(entry(60), long=True)
    longest = max(len(row.ids) for batch in batches for row in batch)
    assert unjudged(cases_of(batches), judged_specs(entry(60))) is None
    monkeypatch.setattr(cases, "MOST_JUDGED", 1)
    note = f"logits of 16 of {longest} positions where fewest are judged"
    assert unjudged(cases_of(batches), judged_specs(entry(60))) == note


def test_they_are_always_the_same() -> None:
    first, second = (cases_of(cached_batches(entry(100), long=False)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.feeds["input_ids"], other.feeds["input_ids"])
