"""Requests for dimensions of a model that was trained in pairs of layers and dimensions, as Starbucks was."""

import json
from collections.abc import Iterator
from pathlib import Path

import nestforge
import numpy as np
import pytest
from nestforge.errors import InputError
from nestforge.integrations.sentence_encoder import SentenceEncoder
from nestforge.runtime.model import ElasticModel
from support.sentence_folders import HIDDEN, TEXTS, TINY, Layout, classes
from support.tiny_models import save_tiny_encoder

PAIRS = [[1, 4], [2, 4], [2, 8], [3, 8], [3, HIDDEN]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Layout(
        "pairs",
        lambda m: [m.Pooling(HIDDEN), m.Normalize()],
        save=lambda f: save_tiny_encoder(f, **{**TINY, "num_hidden_layers": 3}),
    ).write(tmp_path_factory.mktemp("pairs") / "m")
    (path / "README.md").write_text(f"---\nmatryoshka_pairs: {PAIRS}\n---\n")
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[ElasticModel]:
    bundle = nestforge.compile(folder, "host-cpu", output=folder.with_name("b"), buckets=["1x40"], measure=False)
    with nestforge.load(bundle) as loaded:
        yield loaded


def test_dimensions_choose_the_layers_that_they_were_trained_with(folder: Path, model: ElasticModel) -> None:
    theirs = classes().SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    layers = theirs[0].auto_model.encoder.layer
    for dimensions, depth in ((None, 3), (HIDDEN, 3), (8, 3), (4, 2)):
        theirs[0].auto_model.encoder.layer = layers[:depth]
        expected = theirs.encode(list(TEXTS), truncate_dim=dimensions, normalize_embeddings=True)
        answers = [model(text, dimensions=dimensions) for text in TEXTS]
        assert {answer.submodel for answer in answers} == {f"depth{depth}-ffn32-heads2"}
        np.testing.assert_allclose(
            np.concatenate([answer["sentence_embedding"] for answer in answers]), expected, atol=1e-5
        )
    assert model("dog", dimensions=4, submodel="depth1").dimensions == 4
    assert model("dog", dimensions=HIDDEN, submodel="depth1").dimensions == HIDDEN, "all of them always"


def test_other_pairs_are_refused(model: ElasticModel) -> None:
    message = "8 was trained with 2, 3 layers, submodel depth1-.* has 1, which go with 4; ask for"
    with pytest.raises(InputError, match=f"^dimensions: {message}"):
        model("dog", dimensions=8, submodel="depth1")
    with pytest.raises(InputError, match="dimensions: expected one of 16, 8, 4, got 5"):
        model("dog", dimensions=5)
    with pytest.raises(InputError, match=f"^truncate_dim: {message}"):
        SentenceEncoder(model, submodel="depth1", truncate_dim=8)
    with pytest.raises(InputError, match="dimensions: 4 was trained with 1, 2 layers, submodel depth3-"):
        nestforge.index(model, ["dog"], dimensions=4)  # the universal model makes it
    index = nestforge.index(model, ["dog", "fox"], dimensions=8)
    assert index.search(model, "dog", submodel="depth2").entries is not None
    assert index.search(model, "dog", deadline_ms=1e9).submodel.startswith("depth3")
    with pytest.raises(InputError, match=f"^dimensions: {message}"):
        index.search(model, "dog", submodel="depth1")


def test_verify_opens_the_model_as_the_job_had_it(folder: Path, model: ElasticModel) -> None:
    bundle = model.bundle.path
    options = json.loads((bundle / "manifest.json").read_text())["provenance"]["options"]
    assert options["pairs"] == PAIRS
    assert options["exits"] == [1, 2, 3]
    (folder / "README.md").unlink()
    assert nestforge.verify(bundle, against=folder)
