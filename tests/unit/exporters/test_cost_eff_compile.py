"""The whole road: a folder compiled, every engine sliced and held to parity, answers through the runtime."""

from __future__ import annotations

import shutil
from pathlib import Path

import nestforge
import numpy as np
import pytest
import torch
from cost_eff_models import CONFIG, SIDECAR, random_weights, save_folder, save_tiny, shapes_of
from nestforge.compiler.compile import compile_bundle
from nestforge.elastic import Bucket
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from tiny_compile import board
from tiny_models import corpus, save_tiny_encoder


def _compiled(folder: Path, **options: object) -> Path:
    levels = {"ffn": (0.5, 1.0), "heads": (0.5, 1.0)}
    return compile_bundle(folder, board(), folder.with_suffix(".bundle"), levels=levels, **options)  # type: ignore[arg-type]


def test_a_multi_exit_model_travels_as_one_engine(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    bundle = _compiled(folder, buckets=[Bucket(2, 8), Bucket(1, 16)])
    universal = load_universal(open_source(folder))
    ids, mask = np.array([[5, 9, 7, 3, 8]]), np.ones((1, 5), np.int64)
    expected = universal.module.model(*(torch.from_numpy(array) for array in (ids, mask, mask * 0)))
    with nestforge.load(bundle) as model:
        manifest = model.bundle.manifest
        assert manifest.family == "cost_eff"
        assert {engine.emitted for engine in manifest.engines} == {"sliced"}
        assert len({engine.submodel for engine in manifest.engines}) >= 2
        assert {engine.bucket.label for engine in manifest.engines} == {"b2-s8", "b1-s16"}
        universal_id = universal.spec.universal().id
        answer = model({"input_ids": ids, "attention_mask": mask, "token_type_ids": mask * 0})
        assert answer.submodel == universal_id
        assert answer.padding is not None
        assert list(answer.outputs) == list(expected)
        for name, output in expected.items():
            np.testing.assert_allclose(answer[name], output.numpy(), atol=1e-4, err_msg=name)


def test_an_engine_says_zero_of_a_saturated_exit(tmp_path: Path) -> None:
    weights = random_weights(shapes_of(CONFIG, SIDECAR))
    scaled = {name: data * (1e5 if name.startswith("exits") else 1) for name, data in weights.items()}
    bundle = _compiled(save_folder(tmp_path / "m", CONFIG, SIDECAR, scaled), include="budgets")
    ids = np.array([[5, 9, 7, 3, 8, 2, 4, 6]])
    with nestforge.load(bundle) as model:
        answer = model({"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0})
    for layer in (1, 3, 4):
        assert np.diff(np.sort(answer[f"exit_{layer}.logits"][0]))[-1] > 1e3
        assert answer[f"exit_{layer}.entropy"].tolist() == [0.0]


@pytest.mark.parametrize("pool", ["mean", "mean_with_padding"])
def test_a_regression_with_text_and_taylor_ranking(tmp_path: Path, pool: str) -> None:
    changes = {"exits.pool": pool, "exits.classes": 1, "gate": None, "embedding": {"mode": "dense"}}
    folder = save_tiny(tmp_path / "m", sidecar=changes)
    shutil.copy(save_tiny_encoder(tmp_path / "bert") / "tokenizer.json", folder)
    bundle = _compiled(folder, text=corpus(tmp_path / "texts.txt"), include="levels")
    with nestforge.load(bundle) as model:
        assert model.bundle.manifest.ranking.method == "taylor"
        assert model("the quick brown fox")["exit_4.logits"].shape == (1, 1)
