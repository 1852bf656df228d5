"""``nestforge convert-coda``: what it prints, and what its options mean in the folder."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from nestforge.exporters.families.coda.config import (
    MOST_ADAPTER_SIZE,
    MOST_LABELS,
)
from support.commands import error_of, nestforge, usage_of
from support.tiny_models import add_pooling, corpus, save_tiny_encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("convert") / "tiny", num_hidden_layers=2)


def test_it_says_what_it_made(folder: Path, tmp_path: Path) -> None:
    result = nestforge("convert-coda", folder, "--adapter-size", "4", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[:3] == [
        "conditional layers 2 of 2, router soft_top_k",
        "reductions 8, 5, 3, 2, 1; to be trained at 3",
        "keys and values of all",
    ]
    assert lines[3].endswith("a task trains norms 320, adapters 584, routers 64")
    assert lines[4] == "left out pooler"
    assert result.stdout.endswith(f"\nwrote {tmp_path / 'out'}\n")


def test_options_are_fields_of_the_folder(folder: Path, tmp_path: Path) -> None:
    options = {
        "--adapter": "sequential",
        "--router": "sigmoid",
        "--keys-of": "selected",
        "--reduction": "4",
        "--reductions": "4,2",
        "--dense-layers": "0",
        "--num-labels": "3",
        "--adapter-activation": "gelu",
        "--adapter-size": "2",
        "--seed": "1",
    }
    given = [part for option in options.items() for part in option]
    result = nestforge("convert-coda", folder, "--output", tmp_path / "out", "--json", *given)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["groups"]["routers"] == 32
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "model_type": "coda_encoder",
        "adapter": "sequential",
        "router": "sigmoid",
        "keys_of": "selected",
        "reduction": 4,
        "reductions": [4, 2],
        "conditional_layers": [1],
        "num_labels": 3,
        "adapter_activation": "gelu",
        "adapter_size": 2,
    }
    assert {key: config[key] for key in expected} == expected


def test_a_bad_conversion_is_one_line(folder: Path, tmp_path: Path) -> None:
    start = ["convert-coda", folder, "--output", tmp_path / "out"]
    assert error_of(*start, "--dense-layers", "7") == "dense layers: expected numbers from 0 to 1, got 7"
    lora = error_of(*start, "--adapter", "lora", "--adapter-activation", "gelu")
    assert lora == "adapter activation: lora has none, got gelu; leave it out"
    wrong = usage_of(*start, "--reductions", "2,half")
    assert "expected whole numbers with commas between, such as 3,6,9" in wrong
    for option, most in (("--seed", 2**32 - 1), ("--adapter-size", MOST_ADAPTER_SIZE), ("--num-labels", MOST_LABELS)):
        assert f"<={most}; see" in usage_of(*start, option, most + 1)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    encoder = tmp_path_factory.mktemp("nest")
    add_pooling(save_tiny_encoder(encoder / "tiny"))
    corpus(encoder / "corpus.txt")
    return encoder


def nested(encoder: Path, output: Path, *more: str) -> Result:
    return nestforge("nest", encoder / "tiny", "--text", encoder / "corpus.txt", "--output", output, *more)


def test_a_table_of_levels_and_what_was_done(encoder: Path, tmp_path: Path) -> None:
    result = nested(encoder, tmp_path / "out", "--steps", "3", "--levels", "ffn=0.5,1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split("  ")[0] == "submodel"
    assert [line.split()[0] for line in lines[1:3]] == ["50%", "100%"]
    assert [line.split() for line in lines[4:7]] == [
        ["submodel", "id"],
        ["50%", "ffn32-heads4"],
        ["100%", "ffn64-heads4"],
    ]
    assert lines[-1] == f"wrote {tmp_path / 'out'}"
    assert "trained on  319 texts, 3 steps, " in result.stdout
    assert "distill: 3/3" in result.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_json_has_every_figure_and_stdout_nothing_else(encoder: Path, tmp_path: Path) -> None:
    result = nested(encoder, tmp_path / "out", "--steps", "2", "--seed", "7", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert set(data) == {"output", "levels", "texts", "held_out", "steps", "seconds", "seed"}
    assert (data["output"], data["steps"], data["seed"]) == (str(tmp_path / "out"), 2, 7)
    assert set(data["levels"][0]) == {"label", "submodel", "fractions", "parameters", "ranked", "nested"}
    assert [level["fractions"] for level in data["levels"]] == [{"ffn": f} for f in (0.25, 0.5, 0.75, 1.0)]


def test_a_bad_nesting_is_one_line(encoder: Path, tmp_path: Path) -> None:
    start = ["nest", encoder / "tiny", "--text", encoder / "corpus.txt", "--output", tmp_path / "out"]
    says = error_of(*start, "--levels", "depth=0.5,1")
    assert says == "levels: this model has no axis kind 'depth'; expected one of ffn, heads"
    for options, wrong in (
        (["--steps", "3", "--minutes", "1"], "--minutes and --steps: give one of them"),
        (["--steps", "0"], "'--steps': 0 is not in the range x>=1"),
        (["--minutes", "0"], "'--minutes': 0.0 is not in the range x>0"),
        (["--levels", "half"], "'--levels': 'half': expected an axis kind and fractions"),
    ):
        assert wrong in usage_of(*start, *options)
