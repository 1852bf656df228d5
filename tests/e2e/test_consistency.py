"""From a checkpoint to the figures of its submodels: a language model on texts, a vision model on arrays."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from nestforge.bundle.manifest import Manifest, Quality
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.examples.corpus import read_array_corpus, read_corpus
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.runtime.inputs.text import TextEncoder
from nestforge.tools.cli import main
from support.tiny_compile import board
from support.tiny_matlm import save_text_matlm
from support.tiny_models import CLASSES, corpus, save_tiny_matvit

BUCKET = 12  # tokens


def qualities(manifest: Manifest) -> dict[str, Quality]:
    return {entry.id: entry.quality for entry in manifest.submodels if entry.quality is not None}


def run(*arguments: Any) -> Any:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny nested language model, texts, and the bundle of its universal model and of one level."""
    folder = tmp_path_factory.mktemp("language")
    model, texts = save_text_matlm(folder / "model"), corpus(folder / "texts.txt")
    profile = board(buckets=[f"1x{BUCKET}"], budgets={"full": {}})
    compile_bundle(model, profile, folder / "bundle", text=texts, submodels=["ffn16"], include="budgets")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like ``language``: a vision model that is not nested, ranked on images whose labels are its own classes."""
    folder = tmp_path_factory.mktemp("images")
    model = save_tiny_matvit(folder / "model", nested=False, nested_heads=False)
    pixels = np.random.default_rng(0).standard_normal((300, 2, 8, 8)).astype(np.float32)
    logits = load_universal(open_source(model)).module(torch.from_numpy(pixels))[0]
    np.savez(folder / "rows.npz", pixel_values=pixels, labels=logits.argmax(-1).numpy())
    profile = board(buckets=["4x1"], budgets={"full": {}})
    compile_bundle(model, profile, folder / "bundle", data=folder / "rows.npz", submodels=["ffn16"], include="budgets")
    return folder


def test_figures_of_a_language_model_are_those_of_pytorch(language: Path) -> None:
    """Independent of engines, buckets and streaming: one unpadded text at a time through the narrowed modules."""
    manifest = open_bundle(language / "bundle", "full").manifest
    assert [spec.role for spec in manifest.outputs] == ["next_tokens"]
    universal = load_universal(open_source(language / "model"))
    assert manifest.text is not None
    encoder = TextEncoder(language / "model" / "tokenizer.json", manifest.text, manifest.inputs)
    small = universal.narrow(universal.spec.parse("ffn16"))
    held_out = read_corpus(language / "texts.txt").held_out
    agree, losses, forward, prefixes = [], [], [], []
    for text in held_out:
        ids = torch.from_numpy(encoder.encode([text], BUCKET, truncate=True).feeds["input_ids"])
        p, q = (module(ids)[0][0, :-1].double().log_softmax(-1) for module in (small, universal.module))
        same = (p.argmax(-1) == q.argmax(-1)).tolist()
        agree += same
        prefixes.append(same.index(False) if False in same else len(same))
        losses += (-p[torch.arange(len(p)), ids[0, 1:]]).tolist()
        forward += (p.exp() * (p - q)).sum(-1).tolist()
    quality = qualities(manifest)["ffn16"]
    assert (quality.samples, quality.positions) == (len(held_out), len(agree))
    assert quality.figures["token_agreement"] == pytest.approx(np.mean(agree), abs=2 / len(agree)), "but for near ties"
    assert quality.figures["matched_prefix"] == pytest.approx(np.mean(prefixes), abs=0.1)
    assert quality.figures["loss"] == pytest.approx(np.mean(losses), abs=1e-4)
    assert quality.figures["kl_small_to_universal"] == pytest.approx(np.mean(forward), rel=1e-3)
    assert 0 < quality.figures["token_agreement"] < 1
    whole = qualities(manifest)["ffn32"].figures
    assert (whole["token_agreement"], whole["kl_small_to_universal"], whole["kl_universal_to_small"]) == (1.0, 0.0, 0.0)


def test_the_command_says_on_the_held_out_texts_what_the_compile_said(language: Path, tmp_path: Path) -> None:
    held_out = read_corpus(language / "texts.txt").held_out
    (tmp_path / "held-out.txt").write_text("\n".join(held_out))
    found = json.loads(run("consistency", language / "bundle", "--text", tmp_path / "held-out.txt", "--json").stdout)
    manifest = open_bundle(language / "bundle").manifest
    assert found["outputs"] == {"next_tokens": "logits"}
    assert found["data_sha256"] == qualities(manifest)["ffn16"].data_sha256
    for row in found["submodels"]:
        expected = qualities(manifest)[row["submodel"]].figures
        assert row["figures"] == {name: pytest.approx(value) for name, value in expected.items()}


def test_a_bundle_shows_the_figures_that_its_model_has(language: Path, images: Path) -> None:
    columns = "token agreement KL(sub||univ) nats KL(univ||sub) nats matched prefix tokens loss nats/token"
    assert columns in " ".join(run("inspect", language / "bundle").stdout.split())
    shown = run("inspect", images / "bundle").stdout
    columns = "mean cosine recall@10 class agreement accuracy KL(sub||univ) nats KL(univ||sub) nats"
    assert columns in " ".join(shown.split())
    assert "ranked by taylor on 128 samples" in shown
    assert "- matched prefix tokens: " in (language / "bundle" / "report.md").read_text()


def test_images_rank_and_show_quality(images: Path) -> None:
    manifest = open_bundle(images / "bundle", "full").manifest
    corpus = read_array_corpus(images / "rows.npz", open_source(images / "model"))
    assert (manifest.ranking.method, manifest.ranking.data_sha256) == ("taylor", corpus.calibration.sha256)
    assert manifest.provenance.options.data
    small, whole = (qualities(manifest)[name] for name in ("ffn16", "ffn32"))
    assert whole.figures == {
        "class_agreement": 1.0,
        "accuracy": pytest.approx(1.0, abs=1 / whole.samples),
        "kl_small_to_universal": 0.0,
        "kl_universal_to_small": 0.0,
        "mean_cosine": pytest.approx(1.0),
        "recall_at_10": 1.0,
    }
    assert (small.samples, small.positions, small.data_sha256) == (corpus.held_out.size, None, corpus.held_out.sha256)
    assert small.figures["accuracy"] == pytest.approx(small.figures["class_agreement"], abs=1 / small.samples)
    assert small.figures["kl_small_to_universal"] > 0
    assert 1 / CLASSES / 2 < small.figures["class_agreement"] < 1


def test_the_command_takes_images(images: Path) -> None:
    result = run("consistency", images / "bundle", "--data", images / "rows.npz")
    lines = result.stdout.splitlines()
    assert "compared   output logits as classes, output embedding as embedding" in lines
    assert "samples    300" in lines
    assert result.stderr.startswith("compare: ")


def test_text_and_data_do_not_go_together(images: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["compile", str(images / "model"), "--output", str(tmp_path / "b"), "--text", "t", "--data", "d"]
    )
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("nestforge: error: expected at most one of --text and --data")
    assert not (tmp_path / "b").exists()
