from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from nestforge.compiler.examples import rank_axes as module
from nestforge.compiler.examples.corpus import ArrayCorpus, Corpus
from nestforge.compiler.examples.rank_axes import rank_axes, text_encoder
from nestforge.compiler.work.clock import Clock, silent
from nestforge.compiler.work.staging import Stage
from nestforge.errors import BundleCorruptError, CheckpointError, InputError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from nestforge.runtime.consistency.samples import ArraySamples
from support.tiny_compile import save_tiniest
from support.tiny_mixer import save_tiny_mixer
from support.tiny_models import WORDS, word_tokenizer

CORPUS = Corpus(tuple(f"the {a} jumps over {b}" for a, b in pairwise(WORDS)), ("held out",))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = Stage(tmp_path / "stage", tmp_path / "stage" / "work")
    stage.work.mkdir(parents=True)
    return stage


@pytest.fixture
def copy(tiniest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiniest, tmp_path / "model"))


def weights(model: UniversalModel) -> list[torch.Tensor]:
    return [parameter.clone() for parameter in model.parameters().values()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def load(folder: Path) -> UniversalModel:
    return load_universal(open_source(folder))


@pytest.mark.parametrize("corpus", [None, CORPUS], ids=["no text", "text"])
def test_a_nested_model_keeps_its_order(copy: Path, stage: Stage, corpus: Corpus | None) -> None:
    config = json.loads((copy / "config.json").read_text()) | {"nested": True}
    (copy / "config.json").write_text(json.dumps(config))
    model = load(copy)
    before = weights(model)
    ranking = rank_axes(model, corpus, stage, Clock(silent))
    assert (ranking.method, ranking.order_sha256, ranking.samples) == ("none", None, None)
    assert same(before, weights(model))


@pytest.mark.parametrize("corpus", [None, CORPUS], ids=["no text", "text"])
def test_nothing_is_ranked_where_no_axis_has_weights(tmp_path: Path, stage: Stage, corpus: Corpus | None) -> None:
    model = load(save_tiny_mixer(tmp_path / "m", router="tokens_choose"))  # whose capacity and group are axes
    before = weights(model)
    ranking = rank_axes(model, corpus, stage, Clock(silent))
    assert (ranking.method, ranking.order_sha256, ranking.samples) == ("none", None, None)
    assert same(before, weights(model))


def test_without_text_magnitude_decides(tiniest: Path, stage: Stage) -> None:
    model = load(tiniest)
    ranking = rank_axes(model, None, stage, Clock(silent))
    assert (ranking.method, ranking.data_sha256, ranking.samples) == ("magnitude", None, None)
    assert len(ranking.order_sha256 or "") == 64


def test_with_text_taylor_decides_and_says_from_what(tiniest: Path, stage: Stage) -> None:
    events: list[tuple[int, int]] = []
    model = load(tiniest)
    ranking = rank_axes(model, CORPUS, stage, Clock(lambda _, done, total: events.append((done, total))))
    assert (ranking.method, ranking.samples) == ("taylor", len(CORPUS.calibration))
    assert events == [(1, 2), (2, 2)], "23 texts are two batches of at most 16"
    other = rank_axes(load(tiniest), Corpus(CORPUS.calibration[:-1], ()), _fresh(stage), Clock(silent))
    assert other.data_sha256 != ranking.data_sha256
    assert rank_axes(load(tiniest), None, stage, Clock(silent)).order_sha256 != ranking.order_sha256


def test_rows_of_arrays_rank_as_their_texts_do(tiniest: Path, stage: Stage) -> None:
    one, other = load(tiniest), load(tiniest)
    encoder = text_encoder(one)
    assert encoder is not None
    texts = Corpus(CORPUS.calibration[:16], ())  # one batch, so that both are padded alike
    data = ArraySamples(encoder.encode(sorted(texts.calibration, key=len), 64).feeds)
    by_text = rank_axes(one, texts, stage, Clock(silent))
    by_rows = rank_axes(other, ArrayCorpus(data, data), _fresh(stage), Clock(silent))
    assert (by_rows.method, by_rows.samples, by_rows.data_sha256) == ("taylor", 16, data.sha256)
    assert by_rows.order_sha256 == by_text.order_sha256
    assert same(weights(one), weights(other))


def test_rows_that_are_longer_than_the_model_takes(tmp_path: Path, stage: Stage) -> None:
    model = load(save_tiniest(tmp_path / "short", max_position_embeddings=6))
    feeds = {spec.name: np.ones((3, 7), np.int64) for spec in model.source.signature.inputs}
    with pytest.raises(InputError, match="rows have 7 positions, the model takes at most 6; cut them"):
        rank_axes(model, ArrayCorpus(ArraySamples(feeds), ArraySamples(feeds)), stage, Clock(silent))


def test_ranking_is_the_same_every_time(tiniest: Path, stage: Stage) -> None:
    one, other = load(tiniest), load(tiniest)
    assert rank_axes(one, CORPUS, stage, Clock(silent)) == rank_axes(other, CORPUS, _fresh(stage), Clock(silent))
    assert same(weights(one), weights(other))


def test_scores_of_an_interrupted_compile_are_used(
    tiniest: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = load(tiniest), load(tiniest)
    first = rank_axes(one, CORPUS, stage, Clock(silent))
    monkeypatch.setattr(module, "taylor_scores", lambda *_: pytest.fail("computed again"))
    assert rank_axes(other, CORPUS, stage, Clock(silent)) == first
    assert same(weights(one), weights(other))


@pytest.mark.parametrize("nested", [False, True])
def test_text_for_a_model_without_tokenizer_is_refused(copy: Path, stage: Stage, nested: bool) -> None:
    """Also where no ranking needs it: the user expects to see quality."""
    config = json.loads((copy / "config.json").read_text()) | {"nested": nested}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"model: no tokenizer.json, so the text file cannot be read"):
        rank_axes(load(copy), CORPUS, stage, Clock(silent))
    assert text_encoder(load(copy)) is None


def test_a_tokenizer_that_knows_more_than_the_model(tmp_path: Path, stage: Stage) -> None:
    folder = save_tiniest(tmp_path / "small", vocab_size=10)
    word_tokenizer(64).save(str(folder / "tokenizer.json"))
    with pytest.raises(InputError, match=r"^text 0: the tokenizer gives \d+ for input_ids, which takes 0\.\.9"):
        rank_axes(load(folder), CORPUS, stage, Clock(silent))


def test_a_damaged_tokenizer(copy: Path) -> None:
    (copy / "tokenizer.json").write_text('{"version":\n 1')
    with pytest.raises(BundleCorruptError, match=r"model/tokenizer.json: not a tokenizer file") as refusal:
        text_encoder(load(copy))
    assert "\n" not in str(refusal.value)


def test_long_texts_are_cut_to_what_the_model_takes(tmp_path: Path, stage: Stage) -> None:
    folder = save_tiniest(tmp_path / "short", max_position_embeddings=6)
    long = Corpus((" ".join(WORDS), "the fox"), ())
    assert rank_axes(load(folder), long, stage, Clock(silent)).samples == 2


def _fresh(stage: Stage) -> Stage:
    folder = stage.folder.with_name("fresh")
    folder.mkdir()
    return Stage(folder, folder)
