"""Accuracy, routes and cost of engines, on the golden bundle of a tiny Sparse Mixer."""

from __future__ import annotations

from pathlib import Path

import nestforge
import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import InputError
from nestforge.examples.demo.figures.mixer_report import (
    HiddenTokens,
    dropped_share,
    measure_engines,
    read_hidden_tokens,
)
from scipy.special import log_softmax

BUNDLE = Path(__file__).parents[4] / "golden" / "bundle-experts"
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
                assert answer.routing is not None
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
