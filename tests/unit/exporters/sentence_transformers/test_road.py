"""The whole road: a folder of sentence-transformers is compiled, opened, and answers texts with its vectors."""

from __future__ import annotations

from pathlib import Path

import nestforge
import numpy as np
import pytest
import torch
from nestforge.compiler.job import stated_source
from nestforge.errors import InputError
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
