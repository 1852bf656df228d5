"""Training by the same steps, with what is finished kept, and the demonstration compiled in this process."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nestforge
import pytest
import torch
from click.testing import CliRunner
from nestforge.bucket import Bucket
from nestforge.examples.mhe import __main__ as mhe
from nestforge.examples.mhe import train as command
from nestforge.examples.mhe.__main__ import (
    Timed,
    Trained,
    Writing,
    elasticity,
    forms_table,
    quality_table,
    retained,
    writing_table,
)
from nestforge.examples.mhe.fit import KINDS, MODELS, Recipe, Run, Trainer, answers, fit, models, quality
from nestforge.exporters.families.mhe.config import MheConfig, MheDecoderConfig
from nestforge.exporters.families.mhe.model import made
from nestforge.exporters.family import load_model
from support.tiny_compile import board
from torch.nn import functional


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch, tiny: Mapping[str, MheConfig], trainer: Trainer) -> None:
    monkeypatch.setattr(command, "MODELS", tiny)
    monkeypatch.setattr(command, "TRAINER", trainer)
    monkeypatch.setattr(command.os, "cpu_count", lambda: 1)


def test_models_and_records(tmp_path: Path, tiny: Mapping[str, MheConfig]) -> None:
    output = tmp_path / "out"
    result = CliRunner().invoke(command.main, ["--output", str(output)])
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[1:4]] == list(tiny)
    written = (output / "training.json").read_bytes()
    records = json.loads(written)
    assert set(records) == set(tiny)
    for name, record in records.items():
        model = load_model(output / name)
        assert record["parameters"] == sum(parameter.numel() for parameter in model.parameters())
        assert 0 <= record["accuracy"] <= 1
        assert ("commonest" in record) == name.startswith("encoder")
        assert record["loss"] > 0
    assert CliRunner().invoke(command.main, ["--output", str(output)]).exit_code == 0
    assert (output / "training.json").read_bytes() == written


def test_no_sources_are_one_line(tmp_path: Path, stdlib: Path) -> None:
    for file in stdlib.iterdir():
        file.unlink()
    result = CliRunner().invoke(command.main, ["--output", str(tmp_path / "out")])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("train: error: ")
    assert result.stderr.count("\n") == 1


def test_kinds_differ_in_attention_alone() -> None:
    assert list(MODELS) == [f"{shape}-{kind}" for kind in KINDS for shape in ("encoder", "decoder")]
    for shape in ("encoder", "decoder"):
        found = [dict(MODELS[f"{shape}-{kind}"].to_json(), attention=None, factors=None) for kind in KINDS]
        assert all(one == found[0] for one in found)
    assert isinstance(MODELS["decoder-mha"], MheDecoderConfig)


def _model(config: MheConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    return made(config)


@pytest.mark.parametrize("name", ["encoder-mhe_mul", "decoder-mhe_add"])
def test_training_lowers_the_loss_and_moves_head_embeddings(
    name: str, tiny: Mapping[str, MheConfig], trainer: Trainer
) -> None:
    model, data = _model(tiny[name]), trainer.data(tiny[name])
    (batch,) = data.batches(4, 1, seed=3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    worse = quality(model, [batch])["loss"]
    fit(model, [batch] * trainer.recipe.steps, trainer.recipe, trainer.recipe.encoder_rate)
    assert quality(model, [batch])["loss"] < worse
    queries = "layers.0.attention.embedding.query"
    assert not model.state_dict()[queries].equal(before[queries])


def test_quality_is_of_what_is_asked_for(tiny: Mapping[str, MheConfig], trainer: Trainer) -> None:
    config = tiny["encoder-mha"]
    model, rows = _model(config), trainer.data(config).test
    found = quality(model, [rows])
    logits = answers(model, rows).detach()
    assert logits.shape == (*rows.targets.shape, config.vocab_size)
    everywhere = model(rows.inputs, torch.ones_like(rows.inputs))
    assert logits[2, 1].equal(everywhere[2, rows.positions[2, 1]])
    expected = functional.cross_entropy(logits.flatten(0, 1), rows.targets.flatten()).item()
    assert found["loss"] == pytest.approx(expected)
    assert found["accuracy"] == (logits.argmax(-1) == rows.targets).double().mean()


TWO = ("sha", "mhe_mul")
RECIPE = Recipe(steps=2, batch=4, window=16, decoder_rate=1e-2, encoder_rate=1e-2, decay=0.1, share=0.25, held_out=8)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """For the models, which lie in folders of their names beside this file's ``stdlib``."""
    folder = tmp_path_factory.mktemp("demo")
    stdlib = folder / "stdlib"
    stdlib.mkdir()
    for number in range(40):
        lines = (f"def function_{number}_{line}(argument_one, argument_two):" for line in range(8))
        (stdlib / f"module{number}.py").write_text("\n    pass\n\n".join(lines))
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    configs = models(RECIPE.window, **shape)
    names = [f"{side}-{kind}" for kind in TWO for side in ("encoder", "decoder")]
    trainer = Trainer(RECIPE, stdlib)
    return {"folder": folder, **{name: trainer(Run(name, configs[name], folder / name)) for name in names}}


def _compile(model: Path, bundle: Path, *options: str) -> bool:
    variants = {"attention": options[-1].partition("=")[2]} if "--variant" in options else {}
    device = board(budgets={"full": {}}, buckets=["1x16"], variants=variants)
    generate = "--generate" in options
    nestforge.compile(model, device, bundle, measure=False, include="budgets", generate=generate, levels={"ffn": (1,)})
    return True


def test_every_table(monkeypatch: pytest.MonkeyPatch, records: Mapping[str, Any]) -> None:
    monkeypatch.setattr(mhe, "FOLDER", records["folder"])
    monkeypatch.setattr(mhe, "KINDS", TWO)
    monkeypatch.setattr(mhe, "FORMS", ("literal",))
    monkeypatch.setattr(mhe, "BEST", "sha")
    monkeypatch.setattr(mhe, "BUCKET", Bucket(1, 16))
    monkeypatch.setattr(mhe, "compile_once", _compile)
    monkeypatch.setattr(mhe, "host_profile", lambda: board(variants={"attention": "literal"}))
    monkeypatch.setattr(mhe, "_PROMPT", "def f")
    monkeypatch.setattr(mhe, "_TOKENS", 4)
    encoders, decoders, forms, writing = mhe.tables(records).values()
    assert [row[0] for row in encoders.rows] == [row[0] for row in decoders.rows] == list(TWO)
    # Queries, keys and values of one layer: 3 x 16 x 8, and tables of 3 x 2 x 8; output 16 x 16.
    assert [list(row[1:3]) for row in encoders.rows] == [["384", "640"], ["432", "688"]]
    assert encoders.rows[0][4] == "100.0%"
    assert [[*row[:2], row[5]] for row in forms.rows] == [["sha", "-", "yes"], ["mhe_mul", "literal", "yes"]]
    assert forms.rows[1][3] == "1.00x"
    # Keys and values of one head of 8 that all share, in float32.
    assert [list(row[1:3]) for row in writing.rows] == [["64", "1x less"], ["64", "1x less"]]


# GLUE and WikiText-103 of the paper, with the parameters of its BERT-base.
SHA = Trained("sha", 12 * 147_456, 12 * 737_280, 79.2)
MUL = Trained("mhe_mul", 12 * 149_760, 12 * 739_584, 80.6)
MHA = Trained("mha", 12 * 1_769_472, 12 * 2_359_296, 81.9)


def test_the_papers_metrics() -> None:
    assert retained(80.6, 81.9, is_perplexity=False) == pytest.approx(0.984, abs=5e-4)
    assert retained(53.8, 43.0, is_perplexity=True) == pytest.approx(0.749, abs=5e-4)
    assert elasticity(SHA, SHA, is_perplexity=False) is None
    assert elasticity(MUL, SHA, is_perplexity=False) == pytest.approx(5.65, abs=0.1)  # 5.53 of an unrounded score
    words = [Trained(one.kind, one.qkv, one.attention, score) for one, score in ((SHA, 62.0), (MUL, 53.8))]
    assert elasticity(words[1], words[0], is_perplexity=True) == pytest.approx(42.32, abs=0.01)


def test_a_row_for_each_kind() -> None:
    rows = quality_table([MHA, SHA, MUL], is_perplexity=False).rows
    assert [row[0] for row in rows] == ["mha", "sha", "mhe_mul"]
    assert rows[0][1:3] == ["21,233,664", "28,311,552"]
    assert [row[4] for row in rows] == ["100.0%", "96.7%", "98.4%"]
    assert rows[1][5] == "-"


def test_forms_beside_the_literal_one() -> None:
    found = [Timed("mhe_mul", "normal", 1.0, 2_000_000), Timed("mhe_mul", "literal", 1.5, 3_000_000)]
    rows = forms_table([*found, Timed("mha", "-", 2.0, 9_000_000)], {"mhe_mul": "normal"}).rows
    assert [list(row) for row in rows] == [
        ["mhe_mul", "normal", "1.000", "1.50x", "2.00", "yes"],
        ["mhe_mul", "literal", "1.500", "1.00x", "3.00", ""],
        ["mha", "-", "2.000", "-", "9.00", "yes"],
    ]


def test_caches_beside_ordinary_heads() -> None:
    rows = writing_table([Writing("mha", 8192, 1.0), Writing("mhe_mul", 1024, 0.5)]).rows
    assert [row[1:3] for row in rows] == [["8,192", "1x less"], ["1,024", "8x less"]]
