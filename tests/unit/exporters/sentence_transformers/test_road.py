"""The whole road of a folder of sentence-transformers, and its settings of texts, which reach the manifest or are
refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
from nestforge.bundle.manifest import TextEntry
from nestforge.compiler.job import stated_source
from nestforge.errors import CheckpointError, InputError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint
from nestforge.exporters.sentence_transformers.text_settings import ModelConfig, read_model_config, with_text_settings
from nestforge.runtime.retrieval.index import Index
from support.gated_decoders import save_text_decoder
from support.sentence_folders import HIDDEN, TEXTS, Layout, classes, their_vectors
from support.tiny_compile import board

PROMPTS = {"prompts": {"query": "time budget ", "passage": "a "}, "default_prompt_name": "query"}
LAYOUTS = [
    Layout(
        "old mean, layer norm of all numbers, normalised, as nomic v1.5 is asked to be",
        lambda m: [m.Pooling(HIDDEN), m.LayerNorm(HIDDEN), m.Normalize()],
        old=True,
    ),
    Layout(
        "EmbeddingGemma's: two dense; a window that padding reaches beyond",
        lambda m: [
            m.Pooling(HIDDEN),
            m.Dense(HIDDEN, 40, activation_function=torch.nn.GELU()),
            m.Dense(40, 12, bias=False),
            m.Normalize(),
        ],
        save=lambda folder: save_text_decoder(folder, "gemma3_text", use_bidirectional_attention=True),
    ),
    Layout(
        "layer norm and residual, cut",
        lambda m: [
            m.Pooling(HIDDEN, "cls"),
            m.LayerNorm(HIDDEN),
            m.Dropout(0.1),
            m.Dense(HIDDEN, 8, use_residual=True),
        ],
        config={"truncate_dim": 5},
    ),
    *(
        Layout(
            f"{model_type}, padded on the {side}",
            lambda m: [m.Pooling(HIDDEN, ("lasttoken", "weightedmean")), m.Dense(2 * HIDDEN, 8), m.Normalize()],
            save=lambda folder, model_type=model_type: save_text_decoder(folder, model_type),
            tokenizer={"padding_side": side},
        )
        for model_type, side in (("qwen3", "left"), ("mistral", "right"))
    ),
    Layout(
        "a tokenizer that keeps case",
        lambda m: [m.Pooling(HIDDEN), m.Normalize()],
        tokenizer={"tokenizer_class": "BertTokenizer", "do_lower_case": False},
    ),
    Layout("prompt not pooled", lambda m: [m.Pooling(HIDDEN, ("mean", "max"), include_prompt=False)], config=PROMPTS),
]


def compiled(folder: Path, dimensions: tuple[int, ...] | None = None, **changes: object) -> Path:
    profile = board(**{"buckets": ["4x16"], "budgets": {"full": {}}, **changes})
    output = folder.with_suffix(".bundle")
    return nestforge.compile(folder, profile=profile, output=output, include="budgets", dimensions=dimensions)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_text_in_vector_out(tmp_path: Path, layout: Layout) -> None:
    folder = layout.write(tmp_path / "m")
    with nestforge.load(compiled(folder)) as model:
        answer = model(list(TEXTS), truncate=True)
        alone = model(TEXTS[1], dimensions=4)
        normalizes = model.outputs[-1].normalisation == "l2"
    theirs = classes().SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    assert normalizes == any(type(module).__name__ == "Normalize" for module in theirs)
    cut = theirs.encode(TEXTS[1], truncate_dim=4, normalize_embeddings=normalizes)
    np.testing.assert_allclose(answer["sentence_embedding"], theirs.encode(list(TEXTS)), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(alone["sentence_embedding"], cut[None], atol=1e-5, rtol=1e-5)
    assert (alone.dimensions, answer.dimensions) == (4, None)
    assert answer.prompt == (PROMPTS["prompts"]["query"] if layout.config == PROMPTS else "")


def test_every_pooling_at_free_lengths(tmp_path: Path) -> None:
    """All modes in one graph, with rows of one request that pad each other and with every text at its own length."""
    folder = Layout("every mode", lambda m: [m.Pooling(HIDDEN, m.Pooling.POOLING_MODES)]).write(tmp_path / "m")
    expected = their_vectors(folder)
    assert expected.shape == (len(TEXTS), 6 * HIDDEN)
    with nestforge.load(compiled(folder, buckets=["1..4x1..16"])) as model:
        together = model(list(TEXTS), truncate=True)["sentence_embedding"]
        alone = [model(text, truncate=True)["sentence_embedding"] for text in TEXTS]
    np.testing.assert_allclose(together, expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(np.concatenate(alone), expected, atol=1e-5, rtol=1e-5)


def test_submodels_are_sliced_and_share_the_modules_weights(tmp_path: Path) -> None:
    folder = Layout("dense", lambda m: [m.Pooling(HIDDEN), m.Dense(HIDDEN, 24)]).write(tmp_path / "m")
    with nestforge.load(compiled(folder, (6, 12), budgets={"full": {}, "half": {"flops": "70 %"}})) as model:
        manifest = model.bundle.manifest
        assert stated_source(folder, manifest).signature.outputs == manifest.outputs
        assert manifest.outputs[-1].dimensions == (24, 12, 6)
        assert {engine.emitted for engine in manifest.engines} == {"sliced"}
        assert len(manifest.submodels) == 2
        assert {entry.path for entry in manifest.provenance.source} >= {
            "2_Dense/config.json",
            "2_Dense/model.safetensors",
            "1_Pooling/config.json",
            "modules.json",
        }
        assert b"sentence_head.2.linear.weight" in (model.bundle.path / "weights.safetensors").read_bytes()
        whole, half = (model(list(TEXTS), submodel=entry.id) for entry in manifest.submodels)
        assert whole["sentence_embedding"].shape == half["sentence_embedding"].shape == (4, 24)
        short = model(list(TEXTS), dimensions=6)
        np.testing.assert_array_equal(short["sentence_embedding"], model(list(TEXTS))["sentence_embedding"][:, :6])
        assert "cut to 6 dimensions" in repr(short)
        with pytest.raises(InputError, match="dimensions: expected one of 24, 12, 6, got 8, which the model lists"):
            model(TEXTS[1], dimensions=8)


def test_prompts_and_length_of_requests_and_of_an_index(tmp_path: Path) -> None:
    limit = {"max_seq_length": 8}
    folder = Layout("prompts", lambda m: [m.Pooling(HIDDEN)], config=PROMPTS, transformer=limit).write(tmp_path / "m")
    with nestforge.load(compiled(folder)) as model:
        for asked in ({}, {"prompt": ""}, {"prompt_name": "passage"}, {"prompt": "the engine "}):
            found = model(list(TEXTS), truncate=True, **asked)
            np.testing.assert_allclose(found["sentence_embedding"], their_vectors(folder, **asked), atol=1e-5)
        assert "prompt 'time budget '" in repr(model(TEXTS[1]))
        with pytest.raises(
            InputError,
            match=r"text 0: 16 tokens, the prompt included, the model takes 8 \(its max_seq_length\); shorten it or p",
        ):
            model(TEXTS[0])
        with pytest.raises(InputError, match="`prompt_name` 'passages'; did you mean 'passage'"):
            model(TEXTS[0], prompt_name="passages")
        with pytest.raises(InputError, match="`prompt` and `prompt_name`: expected one of them"):
            model(TEXTS[0], prompt_name="passage", prompt="a ")
        with pytest.raises(InputError, match="prompt: applies to text only"):
            model({}, prompt="a ")

        index = Index.build(model, TEXTS, prompt_name="passage", truncate=True)
        vectors = their_vectors(folder, prompt_name="passage")
        np.testing.assert_allclose(
            index.embeddings, vectors / np.linalg.norm(vectors, axis=1, keepdims=True), atol=1e-5
        )
        index.save(tmp_path / "i.npz")
        loaded = Index.load(tmp_path / "i.npz").identity
        assert (loaded.prompt, loaded.truncated) == ("a ", 2)
        found = index.search(model, TEXTS[1], prompt_name="passage", k=1)
        assert (found.ids.tolist(), found.prompt) == ([[1]], "a ")
        assert found.scores[0, 0] == pytest.approx(1)
        assert index.search(model, TEXTS[1], k=1).prompt == "time budget "


TEXT = TextEntry("tokenizer.json", "input_ids", "attention_mask", None, None)
QUERY = {"prompts": {"query": "q: "}, "default_prompt_name": "query"}


def folder_of(folder: Path, **files: dict[str, Any]) -> Checkpoint:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Checkpoint(folder, {}, {})


def test_another_folder_says_nothing(tmp_path: Path) -> None:
    checkpoint = folder_of(tmp_path, sentence_bert_config={"do_lower_case": True})
    assert with_text_settings(checkpoint, TEXT, "pooled") is TEXT


@pytest.mark.parametrize(
    ("transformer", "tokenizer", "longest"),
    [
        ({"max_seq_length": 16}, {"model_max_length": 32}, 16),
        ({"max_seq_length": None}, {"model_max_length": 32}, 32),
        ({}, {"model_max_length": 1e30}, None),
        ({}, {}, None),
    ],
)
def test_case_length_and_prompts(
    tmp_path: Path, transformer: dict[str, Any], tokenizer: dict[str, Any], longest: int | None
) -> None:
    checkpoint = folder_of(
        tmp_path,
        modules={},
        sentence_bert_config={**transformer, "do_lower_case": True},
        tokenizer_config=tokenizer,
        config_sentence_transformers=QUERY,
    )
    assert with_text_settings(checkpoint, TEXT, "pooled") == replace(
        TEXT, max_tokens=longest, lowercase=True, prompts={"query": "q: "}, default_prompt="query", pooled="pooled"
    )


def test_settings_may_lie_in_the_file_of_another_model_type(tmp_path: Path) -> None:
    files = {"sentence_roberta_config": {"query_length": 4}}
    with pytest.raises(CheckpointError, match=r"sentence_roberta_config\.json: query_length is not supported"):
        with_text_settings(folder_of(tmp_path, modules={}, **files), TEXT, None)


def written(folder: Path, data: dict[str, Any]) -> Path:
    (folder / "config_sentence_transformers.json").write_text(json.dumps(data))
    return folder


def test_without_the_file_nothing_is_stated(tmp_path: Path) -> None:
    assert read_model_config(tmp_path) == ModelConfig()


def test_prompts_and_width(tmp_path: Path) -> None:
    stated = {"prompts": {"query": "q: ", "document": None}, "default_prompt_name": "query", "truncate_dim": 8}
    config = read_model_config(written(tmp_path, {**stated, "__version__": {"pytorch": "2"}}))
    assert (config.texts, config.default_prompt_name, config.truncate_dim) == (
        {"query": "q: ", "document": ""},
        "query",
        8,
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"truncate_dim": 0}, "truncate_dim: expected at least 1, got 0"),
        (
            {"model_type": "SparseEncoder"},
            "model_type 'SparseEncoder', which gives sparse vectors over a vocabulary, is not supported",
        ),
        (
            {"default_prompt_name": "quary", "prompts": {"query": ""}},
            "default_prompt_name 'quary'; did you mean 'query'?",
        ),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_model_config(written(tmp_path, data))
