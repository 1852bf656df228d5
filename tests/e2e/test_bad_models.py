"""Model folders that cannot be compiled: one clear line that says where and what, and nothing written."""

import json
import re
import shutil
from pathlib import Path

import nestforge
import numpy as np
import pytest
from click.testing import CliRunner
from nestforge.bucket import Bucket
from nestforge.compiler.compile import compile_bundle
from nestforge.errors import CheckpointError, NestforgeError, UnsupportedModelError
from nestforge.tools.cli import main
from support.refusals import Case, Damage, config, tensor
from support.tiny_compile import board
from support.tiny_mixer import save_tiny_mixer

FFN = "encoder.layer.0.output.dense.weight"


def truncated(keep: float) -> Damage:
    def damage(case: Case) -> None:
        path = case.model / "model.safetensors"
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])

    return damage


def index(weight_map: dict[str, str]) -> Damage:
    def damage(case: Case) -> None:
        (case.model / "model.safetensors").unlink()
        (case.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


def plain(case: Case) -> None:
    """Without the modules of sentence-transformers, which loads the base model whatever class is named."""
    (case.model / "modules.json").unlink(missing_ok=True)
    shutil.rmtree(case.model / "1_Pooling", ignore_errors=True)


MODELS: dict[str, tuple[Damage, str]] = {
    "no folder": (lambda c: shutil.rmtree(c.model), r"model: no such folder; .* given as `hub:OWNER/NAME`"),
    "no config": (
        lambda c: (plain(c), (c.model / "config.json").unlink()),
        r"config.json: cannot be read \(No such file",
    ),
    "no weights": (
        lambda c: (c.model / "model.safetensors").unlink(),
        r"model.safetensors: no such file; expected it or model.safetensors.index.json",
    ),
    "shard missing": (
        index({"a": "model-1.safetensors"}),
        r"model-1.safetensors: no such file; model.safetensors.index.json lists it",
    ),
    "a number for a matrix": (tensor(FFN, np.array(1.0, np.float32)), rf"{FFN} has shape \[\]; .* as config.json"),
    "unknown model_type": (
        config(model_type="mammoth"),
        r"config.json: model_type 'mammoth' is not .* are .*bert, roberta.*-family.md shows how to add one$",
    ),
    "no model_type": (config(model_type=...), r"model_type None is not supported; .* shows how to add one$"),
    "unknown class": (
        lambda c: (plain(c), c.config(architectures=["BertForPretending"])),
        r"architecture 'BertForPretending' is not supported; supported are BertModel, BertForSequenceClassification, ",
    ),
    "architectures is a number": (lambda c: (plain(c), c.config(architectures=5)), r"'5' is not supported; supported"),
    "layers do not fit": (config(num_hidden_layers=3), r"encoder.layer.2.attention.self.query.weight is missing from"),
    "heads do not divide": (config(num_attention_heads=3), r"num_attention_heads: 16 features cannot be split into 3"),
    "hidden_size missing": (config(hidden_size=...), r"config.json: hidden_size: expected .* at least 1, got None$"),
    "positions are a list": (
        config(max_position_embeddings=[40]),
        r"max_position_embeddings: expected a whole number of at least 1, got \[40\]",
    ),
    "unknown activation": (config(hidden_act="swoosh"), r"model: transformers cannot load it \(KeyError: 'swoosh'\)"),
    "a type that transformers refuses": (
        config(layer_norm_eps="small"),
        r"transformers cannot load it \(.*layer_norm_eps.*expected float, got str",
    ),
}
# All others are CheckpointError.
MODELS_ERRORS: dict[str, type[NestforgeError]] = {
    "unknown model_type": UnsupportedModelError,
    "no model_type": UnsupportedModelError,
}


@pytest.mark.parametrize("name", MODELS)
def test_models(case: Case, name: str) -> None:
    case.refused_by(MODELS[name], MODELS_ERRORS.get(name, CheckpointError))


def test_the_command_line_prints_one_line_and_exits_with_1(case: Case) -> None:
    truncated(0.5)(case)
    case.yaml()
    result = CliRunner().invoke(
        main, ["compile", str(case.model), "--profile", case.profile, "--output", str(case.output)]
    )
    assert result.exit_code == 1
    assert result.stdout == ""
    assert re.fullmatch(r"nestforge: error: .*model.safetensors: not a whole safetensors file .*\n", result.stderr)
    assert list(case.output.parent.iterdir()) == []


BUCKET = Bucket(1, 16)


def test_more_slots_than_tokens_are_no_error_but_all_tokens(tmp_path: Path) -> None:
    """The rule for groups so small that the floor of slots exceeds them."""
    options = {"num_hidden_layers": 2, "attention_layers": (1,), "moe_layers": (0,), "capacities": (100,)}
    folder = save_tiny_mixer(tmp_path / "m", min_capacity=20, **options)
    bundle = compile_bundle(folder, board(budgets={"full": {}}), tmp_path / "b", buckets=[BUCKET])
    (engine,) = nestforge.open_bundle(bundle).manifest.engines
    metadata = engine.metadata or {}
    assert [metadata[key] for key in ("capacity", "capacity rounding", "min capacity")] == [16, "half_even", 20]


def test_a_router_that_ties_takes_the_lower_tokens(tmp_path: Path) -> None:
    """The rule for routers whose weights were rounded to half precision: float32 scores, ties to the lower index."""
    options = {"num_hidden_layers": 2, "attention_layers": (1,), "moe_layers": (0,), "capacities": (100,)}
    case = Case(tmp_path, save_tiny_mixer(tmp_path / "m", **options))
    parts = {"layers.0.moe.router.weight": (4, 16), "layers.0.moe.router.bias": (4,)}
    case.weights(lambda w: w.update({name: np.zeros(shape, np.float16) for name, shape in parts.items()}))
    bundle = compile_bundle(case.model, board(budgets={"full": {}}), case.output, buckets=[BUCKET])
    with nestforge.load(bundle) as model:
        (entry,) = model.bundle.manifest.submodels
        zeros = np.zeros((1, 16), np.int64)
        ids = np.random.default_rng(0).integers(1, 24, (1, 16))
        answer = model({"input_ids": ids, "token_type_ids": zeros}, submodel=entry.id, routing=True)
    np.testing.assert_array_equal(answer.routing["routes.0"], np.tile(np.arange(4), (1, 4, 1)))
