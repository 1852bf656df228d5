"""Text in, vector out: the PyTorch module that nestforge compiles against sentence-transformers on the same folder."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from nestforge.exporters.sentence_transformers.head import DenseModule
from nestforge.exporters.sentence_transformers.modules import ACTIVATIONS, POOLING_MODES, Dense
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.gated_decoders import save_text_decoder
from support.sentence_folders import HIDDEN, TEXTS, TINY, Layout, classes, edit, their_vectors
from support.tiny_models import save_tiny_encoder

PROMPTS = {"prompts": {"query": "time budget ", "passage": "a ", "none": None}}


def mean(m):
    return [m.Pooling(HIDDEN)]


LAYOUTS = [
    *(Layout(mode, lambda m, mode=mode: [m.Pooling(HIDDEN, mode)]) for mode in POOLING_MODES),
    *(Layout(f"old {mode}", lambda m, mode=mode: [m.Pooling(HIDDEN, mode)], old=True) for mode in POOLING_MODES),
    Layout("old mean, normalised", lambda m: [m.Pooling(HIDDEN), m.Normalize()], old=True),
    Layout("normalised", lambda m: [m.Pooling(HIDDEN, "cls"), m.Normalize()]),
    Layout("several modes", lambda m: [m.Pooling(HIDDEN, ("lasttoken", "mean", "max"))]),
    Layout("old, several modes", lambda m: [m.Pooling(HIDDEN, ("cls", "max", "mean"))], old=True),
    Layout("a folder of another name", mean, renamed={"1_Pooling": "pooling"}),
    Layout("dense", lambda m: [m.Pooling(HIDDEN, "cls"), m.Dense(HIDDEN, 24), m.Normalize()]),
    Layout("old dense", lambda m: [m.Pooling(HIDDEN, "cls"), m.Dense(HIDDEN, 24), m.Normalize()], old=True),
    Layout(
        "two dense, no bias",
        lambda m: [
            m.Pooling(HIDDEN),
            m.Dense(HIDDEN, 40, bias=False, activation_function=torch.nn.Identity()),
            m.Dense(40, HIDDEN, bias=False, activation_function=torch.nn.Identity()),
            m.Normalize(),
        ],
    ),
    Layout("residual", lambda m: [m.Pooling(HIDDEN), m.Dense(HIDDEN, HIDDEN, use_residual=True)]),
    Layout("projected residual", lambda m: [m.Pooling(HIDDEN), m.Dense(HIDDEN, 8, use_residual=True)]),
    Layout("normalised before dense", lambda m: [m.Pooling(HIDDEN), m.Normalize(), m.Dense(HIDDEN, 8)]),
    Layout("layer norm", lambda m: [m.Pooling(HIDDEN), m.LayerNorm(HIDDEN), m.Dropout(0.5)]),
    Layout(
        "dense on tokens",
        lambda m: [
            m.Dense(HIDDEN, 12, module_input_name="token_embeddings"),
            m.Normalize("token_embeddings"),
            m.Pooling(12, ("max", "weightedmean")),
        ],
    ),
    Layout("prompts, none asked", mean, config=PROMPTS),
    Layout("default prompt", mean, config={**PROMPTS, "default_prompt_name": "query"}),
    Layout("default prompt left out", mean, config={**PROMPTS, "default_prompt_name": "query"}, ask={"prompt": ""}),
    Layout("prompt by name", mean, config={**PROMPTS, "default_prompt_name": "query"}, ask={"prompt_name": "passage"}),
    Layout("null prompt", mean, config={**PROMPTS, "default_prompt_name": "query"}, ask={"prompt_name": "none"}),
    Layout("prompt as text", lambda m: [m.Pooling(HIDDEN, "lasttoken")], ask={"prompt": "the engine: "}),
    *(
        Layout(
            f"prompt not pooled, {mode}",
            lambda m, mode=mode: [m.Pooling(HIDDEN, mode, include_prompt=False)],
            config={**PROMPTS, "default_prompt_name": "query"},
        )
        for mode in POOLING_MODES
    ),
    Layout("prompt not pooled, none asked", lambda m: [m.Pooling(HIDDEN, "cls", include_prompt=False)], config=PROMPTS),
    Layout("max_seq_length", mean, transformer={"max_seq_length": 6}),
    Layout("max_seq_length with a prompt", mean, transformer={"max_seq_length": 6}, ask={"prompt": "time budget "}),
    Layout("truncated embedding", lambda m: [m.Pooling(HIDDEN), m.Normalize()], config={"truncate_dim": 5}),
    Layout("roberta", mean, save=lambda f: save_tiny_encoder(f, "roberta", **TINY, pad_token_id=0)),
    *(
        Layout(
            f"{model_type}, last token, padded on the {side}",
            lambda m: [m.Pooling(HIDDEN, "lasttoken"), m.Normalize()],
            save=lambda f, model_type=model_type, own=own: save_text_decoder(f, model_type, **own),
            tokenizer={"padding_side": side},
            config={"prompts": {"query": "time budget "}, "default_prompt_name": "query"},
        )
        for model_type, own in (("llama", {}), ("qwen3", {}), ("gemma3_text", {"use_bidirectional_attention": True}))
        for side in ("left", "right")
    ),
    Layout(
        "llama, weighted mean without the prompt, padded on the left",
        lambda m: [m.Pooling(HIDDEN, ("weightedmean", "cls"), include_prompt=False)],
        save=save_text_decoder,
        tokenizer={"padding_side": "left"},
        ask={"prompt": "time budget "},
    ),
    Layout(
        "a language model's class and names",
        lambda m: [m.Pooling(HIDDEN, "cls")],
        save=lambda f: save_tiny_encoder(f, "bert", "ForMaskedLM", **TINY),
        kept=True,
    ),
    Layout(
        "a causal language model's class and names",
        lambda m: [m.Pooling(HIDDEN, "lasttoken")],
        save=lambda f: save_text_decoder(f, "qwen3", bare=False),
        kept=True,
    ),
    *(
        Layout(f"BertTokenizer, {settings}", mean, tokenizer={"tokenizer_class": "BertTokenizer", **settings})
        for settings in ({"do_lower_case": False}, {"do_lower_case": True}, {"strip_accents": False})
    ),
    Layout("electra", mean, save=lambda f: save_tiny_encoder(f, "electra", **{**TINY, "embedding_size": HIDDEN})),
]


def our_vectors(folder: Path, **asked: str) -> np.ndarray:
    universal = load_universal(open_source(folder))
    encoder = universal.source.encoder
    encoded = encoder.encode(TEXTS, 40, truncate=True, prompt=encoder.entry.prompt(**asked))
    signature = universal.source.signature
    with torch.no_grad():
        outputs = universal.module(*(torch.from_numpy(encoded.feeds[spec.name]) for spec in signature.inputs))
    found = dict(zip([spec.name for spec in signature.outputs], outputs, strict=True))
    return found[signature.text.embedding or ""].numpy()


def test_lower_case(tmp_path: Path) -> None:
    """The tiny tokenizer lowers case itself, so its normalizer is taken out first."""
    folder = Layout("lower", mean, transformer={"do_lower_case": True}).write(tmp_path / "m")
    edit(folder / "tokenizer.json", lambda data: {**data, "normalizer": {"type": "NFC"}})
    expected = their_vectors(folder)
    np.testing.assert_allclose(our_vectors(folder), expected, atol=1e-5, rtol=1e-5)
    edit(folder / "sentence_bert_config.json", lambda data: {**data, "do_lower_case": False})
    assert np.abs(our_vectors(folder)[0] - expected[0]).max() > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_vectors_are_those_of_sentence_transformers(tmp_path: Path, layout: Layout) -> None:
    folder = layout.write(tmp_path / "m")
    expected, found = their_vectors(folder, **layout.ask), our_vectors(folder, **layout.ask)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_case_is_kept_where_the_tokenizer_settings_say_so(tmp_path: Path) -> None:
    """The tiny tokenizer lowers case itself: without its settings the vectors are others."""
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    folder = Layout("kept", mean, tokenizer=settings).write(tmp_path / "m")
    expected = their_vectors(folder)
    np.testing.assert_allclose(our_vectors(folder), expected, atol=1e-5, rtol=1e-5)
    (folder / "tokenizer_config.json").unlink()
    assert np.abs(our_vectors(folder)[0] - expected[0]).max() > 1e-3


def test_a_vocabulary_without_a_tokenizer_file(tmp_path: Path) -> None:
    folder = Layout("vocabulary", mean, tokenizer={"tokenizer_class": "BertTokenizer"}).write(tmp_path / "m")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in sorted(vocabulary, key=vocabulary.get)))
    assert folder / "vocab.txt" not in open_source(folder).source_files()
    (folder / "tokenizer.json").unlink()
    np.testing.assert_allclose(our_vectors(folder), their_vectors(folder), atol=1e-5, rtol=1e-5)
    assert folder / "vocab.txt" in open_source(folder).source_files()


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_are_those_of_torch(name: str) -> None:
    """By the library's own module, without a folder: what a folder does is shown above."""
    torch.manual_seed(0)
    theirs = classes().Dense(HIDDEN, 8, activation_function=getattr(torch.nn, name)())
    ours = DenseModule(Dense(takes=HIDDEN, outputs=8, bias=True, activation=name, residual=False))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, HIDDEN)
    expected = theirs({"sentence_embedding": x})["sentence_embedding"]
    torch.testing.assert_close(ours(x), expected, rtol=0, atol=0)
