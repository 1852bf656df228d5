"""Accuracy, routes and cost of engines, on the golden bundle of a tiny Sparse Mixer."""

from dataclasses import replace
from pathlib import Path

import nestforge
import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import InputError
from nestforge.examples.sparse_mixer.__main__ import submodels
from nestforge.examples.sparse_mixer.report import (
    CAPACITY,
    EXPERTS,
    GROUP,
    HiddenTokens,
    Measured,
    capacity_table,
    compute_table,
    dropped_share,
    experts_table,
    heading,
    measure_engines,
    read_hidden_tokens,
    routers_table,
    seeds_table,
)
from scipy.special import log_softmax

BUNDLE = Path(__file__).parents[3] / "golden" / "bundle-experts"
BUCKET = Bucket(1, 16)
ROWS, HIDDEN = 6, 3


@pytest.fixture(scope="module")
def hidden() -> HiddenTokens:
    draw = np.random.default_rng(0)
    ids = draw.integers(1, 24, (ROWS, 16))
    positions = np.sort(draw.permuted(np.tile(np.arange(16), (ROWS, 1)), axis=1)[:, :HIDDEN])
    return HiddenTokens(
        {"input_ids": ids, "token_type_ids": np.zeros_like(ids)}, positions, draw.integers(0, 24, (ROWS, HIDDEN))
    )


def test_every_engine_by_the_answers_of_its_submodel(hidden: HiddenTokens) -> None:
    found = measure_engines({"tiny": open_bundle(BUNDLE)}, BUCKET, hidden, lambda *_: None)
    with nestforge.load(BUNDLE, threads=1) as model:
        engines = [engine for engine in model.bundle.manifest.engines if engine.bucket == BUCKET]
        assert len(found) == len(engines) > 1
        for measured, engine in zip(found, engines, strict=True):
            right, nats, dropped = [], [], []
            for row in range(ROWS):
                feeds = {name: array[row : row + 1] for name, array in hidden.inputs.items()}
                answer = model(feeds, submodel=engine.submodel, routing=True)
                for at, target in zip(hidden.positions[row], hidden.targets[row], strict=True):
                    logits = answer["logits"][0, at]
                    right.append(int(logits.argmax()) == target)
                    nats.append(-log_softmax(logits.astype(np.float64))[target])
                dropped.append({n: 1 - len(set(routes.ravel().tolist())) / 16 for n, routes in answer.routing.items()})
            entry = model.bundle.manifest.submodel(engine.submodel)
            assert (measured.model, measured.bucket, measured.parameters) == ("tiny", BUCKET, entry.parameters)
            assert (measured.flops, measured.group) == (engine.flops, 16)
            assert {kind: (value,) for kind, value in measured.values.items()} == entry.values
            assert measured.accuracy == np.mean(right)
            assert measured.loss == pytest.approx(np.mean(nats))
            expected = {name: np.mean([share[name] for share in dropped]) for name in dropped[0]}
            assert measured.dropped == pytest.approx(expected)
            assert measured.milliseconds > 0


def test_rows_that_leave_a_batch_unfilled_are_refused(hidden: HiddenTokens) -> None:
    with pytest.raises(InputError, match=r"^6 rows of hidden tokens: expected a multiple of the batch, 4$"):
        measure_engines({"tiny": open_bundle(BUNDLE)}, Bucket(4, 16), hidden, lambda *_: None)


def test_dropped_by_either_kind_of_routes() -> None:
    experts = np.array([[[0, 1], [1, 2]], [[3, 2], [2, 3]]])  # of two groups of four tokens
    tokens = np.array([[0, 1, -1, 0], [1, 0, 1, 1]])
    assert dropped_share(experts, 8) == 3 / 8
    assert dropped_share(tokens, 8) == 1 / 8


def test_rows_as_training_writes_them(hidden: HiddenTokens, tmp_path: Path) -> None:
    path = tmp_path / "test.npz"
    np.savez(path, positions=hidden.positions, targets=hidden.targets, **hidden.inputs)
    read = read_hidden_tokens(path)
    assert read.inputs.keys() == hidden.inputs.keys()
    assert (read.positions == hidden.positions).all()
    assert (read.targets == hidden.targets).all()
    np.savez(path, positions=hidden.positions, **hidden.inputs)
    with pytest.raises(InputError, match=r"has no array 'targets'; expected positions and targets"):
        read_hidden_tokens(path)


FULL = {CAPACITY: 100, GROUP: 64, EXPERTS: 4}


def measured(model: str, milliseconds: float, **lowered: int) -> Measured:
    """Accuracy is the share of the capacity, so that rows can be told apart."""
    values = {} if model == "peer" else {**FULL, **lowered}
    if model == "tokens":
        del values[EXPERTS]
    capacity = values.get(CAPACITY, 60)
    dropped = {"routes.1": 0.25, "routes.2": 0.5} if values else {}
    cost = (250_000 * values.get(EXPERTS, 1), 1e6 * capacity, milliseconds)
    return Measured(model, values, Bucket(4, 16), values.get(GROUP), *cost, capacity / 100, 1.5, dropped)


FOUND = [
    measured("experts", 1.0, **{CAPACITY: 50}),
    measured("experts", 2.0),
    measured("experts", 2.5, **{GROUP: 16}),
    measured("experts", 1.5, **{EXPERTS: 2}),
    measured("tokens", 1.25, **{CAPACITY: 50}),
    measured("tokens", 2.5),
    measured("peer", 5.0),
]


def test_routers_at_full_budget() -> None:
    assert routers_table(FOUND, ["experts", "tokens"], "peer").rows == [
        ["experts", "100.00", "1.500", "37.5", "2.000", "2.50"],
        ["tokens", "100.00", "1.500", "37.5", "2.500", "2.00"],
    ]


def test_compute_beside_the_peer_and_at_half_capacity() -> None:
    assert compute_table(FOUND, ["peer", "experts"], "experts", "peer").rows == [
        ["peer", "60.0", "0.25", "60.00", "5.000", "1.00"],
        ["experts", "100.0", "1.00", "100.00", "2.000", "2.50"],
        ["experts, capacity 50 %", "50.0", "1.00", "50.00", "1.000", "5.00"],
    ]


def test_capacities_and_groups_with_all_experts() -> None:
    rows = capacity_table(FOUND, "peer").rows
    assert [row[:4] for row in rows] == [
        ["experts", "100", "64", "100.00"],
        ["experts", "50", "64", "50.00"],
        ["experts", "100", "16", "100.00"],
        ["tokens", "100", "64", "100.00"],
        ["tokens", "50", "64", "50.00"],
    ]
    assert [row[-2:] for row in rows][:2] == [["2.000", "2.50"], ["1.000", "5.00"]]


def test_groups_that_a_batch_does_not_fill_are_one_row() -> None:
    alike = [replace(one, group=one.group and 16) for one in FOUND]
    rows = capacity_table(alike, "peer").rows
    assert [row[:3] for row in rows if row[0] == "experts"] == [["experts", "100", "16"], ["experts", "50", "16"]]
    assert rows[0][-2] == "2.000", "that of the trained group"


def test_fewer_experts_at_the_capacity_of_training() -> None:
    rows = experts_table(FOUND, "experts").rows
    assert [row[:2] for row in rows] == [["4", "1.00"], ["2", "0.50"]]


def test_every_training_has_a_row() -> None:
    table = seeds_table({"experts": {"100 % of 64 tokens": 0.4567, "50 % of 64 tokens": 0.45}, "peer": {"whole": 0.5}})
    assert table.columns == ["training", "100 % of 64 tokens", "50 % of 64 tokens", "whole"]
    assert table.rows == [["experts", "45.67", "45.00", "-"], ["peer", "-", "-", "50.00"]]


@pytest.mark.parametrize(("bucket", "words"), [((1, 128), "one row of"), ((8, 128), "8 rows of")])
def test_buckets_in_words(bucket: tuple[int, int], words: str) -> None:
    assert heading(Bucket(*bucket)) == f"{words} 128 tokens a run"


def test_submodels_of_the_demonstration() -> None:
    assert submodels("bert") == []
    assert submodels("tokens-choose")[0] == "moe.capacity_factor75-moe.group_size128"
    assert submodels("sparse-mixer")[-1] == "moe.capacity_factor100-moe.group_size1024-moe.experts6"
    assert len(submodels("sparse-mixer")) == 4 + 3
