"""Every kind of bad input: one clear line that says where and what, and nothing written."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import yaml
from click.testing import CliRunner
from nestforge.compiler import templates as templates_module
from nestforge.compiler.compile import compile_bundle
from nestforge.elastic import Bucket
from nestforge.errors import (
    BuildError,
    BundleCorruptError,
    CheckpointError,
    ExportError,
    InputError,
    NestforgeError,
    OutputError,
    PlanError,
    ProfileError,
    UnsupportedModelError,
)
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.profiles.device_profile import profile_data
from nestforge.tools.cli import main
from tiny_compile import board, save_tiniest, template_of
from tiny_models import _tokenizer


class Case:
    """One compile that must be refused: a copy of the model to damage, a profile, and the arguments."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.inputs = folder / "inputs"
        self.model = Path(shutil.copytree(model, self.inputs / "model"))
        self.profile: Any = board()
        self.output = folder / "outputs" / "out"
        self.output.parent.mkdir()
        self.arguments: dict[str, Any] = {}

    def config(self, **changes: Any) -> None:
        path = self.model / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))

    def weights(self, change: Callable[[dict[str, np.ndarray]], object]) -> None:
        tensors = safetensors.numpy.load_file(self.model / "model.safetensors")
        change(tensors)
        safetensors.numpy.save_file(tensors, self.model / "model.safetensors", metadata={"format": "pt"})

    def yaml(self, text: str | None = None, **changes: Any) -> None:
        self.profile = str(self.inputs / "device.yaml")
        data = {key: value for key, value in (profile_data(board()) | changes).items() if value is not ...}
        Path(self.profile).write_text(text if text is not None else yaml.safe_dump(data))

    def text(self, raw: bytes | None) -> None:
        self.arguments["text"] = self.inputs / "text.txt"
        if raw is not None:
            self.arguments["text"].write_bytes(raw)

    def refused(self) -> NestforgeError:
        before = sorted(self.output.parent.iterdir())
        with pytest.raises(NestforgeError) as failure:
            compile_bundle(self.model, self.profile, self.output, **self.arguments)
        message = str(failure.value)
        assert message
        assert "\n" not in message
        assert len(message) < 800
        assert sorted(self.output.parent.iterdir()) == before, "something was left behind"
        return failure.value


@pytest.fixture
def case(tmp_path: Path, model: Path) -> Case:
    return Case(tmp_path, model)


FFN = "encoder.layer.0.output.dense.weight"


def truncate(case: Case, keep: float) -> None:
    path = case.model / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


def pickle(case: Case) -> None:
    (case.model / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1)}, case.model / "pytorch_model.bin")


def index(case: Case, content: Any) -> None:
    (case.model / "model.safetensors").unlink()
    (case.model / "model.safetensors.index.json").write_text(json.dumps(content))


MODELS: dict[str, tuple[Callable[[Case], object], type[NestforgeError], str]] = {
    "no folder": (
        lambda c: shutil.rmtree(c.model),
        CheckpointError,
        r"model: no such folder; expected config.json and",
    ),
    "no config": (lambda c: (c.model / "config.json").unlink(), CheckpointError, r"config.json: no such file"),
    "config is no JSON": (
        lambda c: (c.model / "config.json").write_text("{'a': 1}"),
        CheckpointError,
        r"config.json: not JSON \(",
    ),
    "no weights": (
        lambda c: (c.model / "model.safetensors").unlink(),
        CheckpointError,
        r"model.safetensors: no such file; expected it or model.safetensors.index.json",
    ),
    "empty weights": (lambda c: truncate(c, 0), CheckpointError, r"model.safetensors: not a whole safetensors file"),
    "half a header": (lambda c: truncate(c, 0.01), CheckpointError, r"not a whole safetensors file .*; fetch it again"),
    "truncated": (lambda c: truncate(c, 0.9), CheckpointError, r"not a whole safetensors file .*; fetch it again"),
    "pickle": (
        pickle,
        CheckpointError,
        r"pytorch_model.bin: pickled weights are refused .* convert once .*save_pretrained",
    ),
    "index without shards": (
        lambda c: index(c, {"weight_map": {}}),
        CheckpointError,
        r"expected a weight_map of tensor",
    ),
    "shard outside": (
        lambda c: index(c, {"weight_map": {"a": "../../secret.safetensors"}}),
        CheckpointError,
        r"shard '../../secret.safetensors' leaves the model folder",
    ),
    "shard missing": (
        lambda c: index(c, {"weight_map": {"a": "model-1.safetensors"}}),
        CheckpointError,
        r"model-1.safetensors: no such file; model.safetensors.index.json lists it",
    ),
    "wrong shape on an axis": (
        lambda c: c.weights(lambda w: w.update({FFN: np.zeros((16, 24), np.float32)})),
        CheckpointError,
        rf"tensor {FFN} has shape \[16, 24\]; expected 32 in dimension 1 for layers.0.ffn",
    ),
    "wrong rank on an axis": (
        lambda c: c.weights(lambda w: w.update({FFN: np.zeros(16, np.float32)})),
        CheckpointError,
        rf"tensor {FFN} has shape \[16\]; expected 32 in dimension 1 for layers.0.ffn",
    ),
    "a number for a matrix": (
        lambda c: c.weights(lambda w: w.update({FFN: np.array(1.0, np.float32)})),
        CheckpointError,
        rf"tensor {FFN} is a single number",
    ),
    "wrong shape elsewhere": (
        lambda c: c.weights(lambda w: w.update({"embeddings.LayerNorm.bias": np.zeros(9, np.float32)})),
        CheckpointError,
        r"tensor embeddings.LayerNorm.bias has shape \[9\]; config.json says \[16\]",
    ),
    "a tensor missing on an axis": (
        lambda c: c.weights(lambda w: w.pop(FFN)),
        CheckpointError,
        rf"tensor {FFN} is missing from the weights",
    ),
    "a tensor missing elsewhere": (
        lambda c: c.weights(lambda w: w.pop("embeddings.LayerNorm.bias")),
        CheckpointError,
        r"tensor embeddings.LayerNorm.bias is missing from the weights",
    ),
    "NaN": (
        lambda c: c.weights(lambda w: w[FFN].__setitem__((3, 5), np.nan)),
        CheckpointError,
        rf"tensor {FFN} holds NaN or infinite values",
    ),
    "infinity": (
        lambda c: c.weights(lambda w: w["pooler.dense.bias"].__setitem__(0, -np.inf)),
        CheckpointError,
        r"tensor pooler.dense.bias holds NaN or infinite values",
    ),
    "unknown model_type": (
        lambda c: c.config(model_type="mamba"),
        UnsupportedModelError,
        r"config.json: model_type 'mamba' is not supported; supported are .*bert, roberta.*; docs/writing-a-family.md",
    ),
    "no model_type": (
        lambda c: c.config(model_type=...),
        UnsupportedModelError,
        r"model_type None is not supported; supported are",
    ),
    "unknown class": (
        lambda c: c.config(architectures=["BertForPretending"]),
        CheckpointError,
        r"architecture 'BertForPretending' is not supported; the bert family reads classes that end in Model, ",
    ),
    "architectures is a number": (lambda c: c.config(architectures=5), CheckpointError, r"architecture '5' is not"),
    "layers do not fit": (
        lambda c: c.config(num_hidden_layers=3),
        CheckpointError,
        r"expected 3 tensors encoder.layer.N.attention.self.query.weight, as config.json says, got 2",
    ),
    "heads do not divide": (
        lambda c: c.config(num_attention_heads=3),
        CheckpointError,
        r"query.weight has shape \[16, 16\]; expected 15 in dimension 0 for layers.0.heads",
    ),
    "no heads": (
        lambda c: c.config(num_attention_heads=0),
        CheckpointError,
        r"config.json: num_attention_heads: expected a whole number of at least 1, got 0",
    ),
    "hidden_size missing": (
        lambda c: c.config(hidden_size=...),
        CheckpointError,
        r"config.json: hidden_size: expected a whole number of at least 1, got None",
    ),
    "hidden_size is text": (
        lambda c: c.config(hidden_size="16"),
        CheckpointError,
        r"hidden_size: expected .* got '16'",
    ),
    "positions are a list": (
        lambda c: c.config(max_position_embeddings=[40]),
        CheckpointError,
        r"max_position_embeddings: expected a whole number of at least 1, got \[40\]",
    ),
    "unknown activation": (
        lambda c: c.config(hidden_act="swoosh"),
        CheckpointError,
        r"model: transformers cannot load it \(KeyError: 'swoosh'\)",
    ),
    "a type that transformers refuses": (
        lambda c: c.config(layer_norm_eps="small"),
        CheckpointError,
        r"transformers cannot load it \(.*layer_norm_eps.*expected float, got str",
    ),
}

PROFILES: dict[str, tuple[Callable[[Case], object], type[NestforgeError], str]] = {
    "unknown name": (
        lambda c: setattr(c, "profile", "raspbery-pi-5"),
        ProfileError,
        r"'raspbery-pi-5': neither a file nor a built-in profile; did you mean 'raspberry-pi-5'",
    ),
    "a folder": (lambda c: setattr(c, "profile", c.inputs), ProfileError, r"neither a file nor a built-in profile"),
    "no YAML": (lambda c: c.yaml("a: [1"), ProfileError, r"device.yaml: not a readable YAML file \(line \d, column \d"),
    "no mapping": (lambda c: c.yaml("- 1"), ProfileError, r"device.yaml: expected a mapping, got a list"),
    "empty": (lambda c: c.yaml(""), ProfileError, r"device.yaml: expected a mapping, got nothing"),
    "unknown key": (
        lambda c: c.yaml(memmory_mb=5),
        ProfileError,
        r"unknown key 'memmory_mb'; did you mean 'memory_mb'\?",
    ),
    "missing key": (lambda c: c.yaml(cores=...), ProfileError, r"device.yaml: missing key 'cores'"),
    "wrong type": (lambda c: c.yaml(cores="four"), ProfileError, r"cores: expected a whole number, got str 'four'"),
    "width multiple that is a float": (
        lambda c: c.yaml(width_multiple=8.0),
        ProfileError,
        r"width_multiple: got 8.0; expected one of 16, 64, 8|width_multiple: got 8.0; did you mean '8'",
    ),
    "opset that is a float": (lambda c: c.yaml(opset=20.0), ProfileError, r"opset: got 20.0; "),
    "absurd number": (
        lambda c: c.yaml(memory_mb=10**400),
        ProfileError,
        r"memory_mb: expected a number below 2\^63, got int of 1329 bits",
    ),
    "absurd hexadecimal number": (
        lambda c: c.yaml(yaml.safe_dump(profile_data(board())).replace("cores: 1", f"cores: 0x{'f' * 5000}")),
        ProfileError,
        r"cores: expected a number below 2\^63, got int of 20000 bits",
    ),
    "no buckets": (lambda c: c.yaml(buckets=[]), ProfileError, r"buckets: expected a list such as \[1x32, 1x128\]"),
    "broken bucket": (
        lambda c: c.yaml(buckets=["1x0"]),
        ProfileError,
        r"buckets: bucket '1x0': expected BATCHxSEQUENCE",
    ),
    "no budgets": (lambda c: c.yaml(budgets={}), ProfileError, r"budgets: expected at least one"),
    "broken share": (
        lambda c: c.yaml(budgets={"half": {"flops": "half"}}),
        ProfileError,
        r'budgets.half: flops: expected a positive number or a share such as "50 %", got \'half\'',
    ),
    "another backend": (
        lambda c: c.yaml(backend="tensorrt"),
        BuildError,
        r"profile board: backend tensorrt cannot be built by this release, onnxruntime can",
    ),
    "impossible budget": (
        lambda c: c.yaml(budgets={"full": {}, "watch": {"parameters": 10}}),
        PlanError,
        r"budget 'watch': not even the smallest submodel ffn8-heads1 fits: parameters .* exceeds 10 by .*; raise",
    ),
    "device too small": (
        lambda c: c.yaml(memory_mb=0.001),
        PlanError,
        r"budget 'full': not even the smallest submodel ffn8-heads1 fits: memory of board .* exceeds 0.00 MB",
    ),
    "levels of an unknown kind": (
        lambda c: c.yaml(levels={"rank": [0.5, 1.0]}),
        PlanError,
        r"levels: this model has no axis kind 'rank'; expected one of ffn, heads",
    ),
}

ARGUMENTS: dict[str, tuple[Callable[[Case], object], type[NestforgeError], str]] = {
    "levels of an unknown kind": (
        lambda c: c.arguments.update(levels={"fnn": [0.5, 1.0]}),
        PlanError,
        r"levels: this model has no axis kind 'fnn'; did you mean 'ffn'\?",
    ),
    "levels that fall": (
        lambda c: c.arguments.update(levels={"ffn": [1.0, 0.5]}),
        PlanError,
        r"levels: ffn: expected fractions that increase from above 0 to 1, got \[1, 0.5\]",
    ),
    "bucket too long": (
        lambda c: c.arguments.update(buckets=[Bucket(1, 41)]),
        ExportError,
        r"bucket b1-s41: .* takes at most 40 tokens",
    ),
    "bucket too short for text": (
        lambda c: c.arguments.update(buckets=[Bucket(1, 1)]),
        InputError,
        r"bucket b1-s1: too short for text",
    ),
    "submodel off the axes": (
        lambda c: c.arguments.update(submodels=["ffn64-heads2"]),
        PlanError,
        r"axis layers.0.ffn: expected 1..32, got 64",
    ),
    "submodel of another depth": (
        lambda c: c.arguments.update(submodels=["ffn8x3"]),
        PlanError,
        r"axis kind ffn: expected 2 values, one per layer, got more",
    ),
    "submodel by label": (
        lambda c: c.arguments.update(submodels=["S"]),
        PlanError,
        r"submodel 'S': cannot read 'S'; expected ids like ffn32-heads2",
    ),
    "unknown include": (
        lambda c: c.arguments.update(include="everything"),
        PlanError,
        r"include 'everything': expected one of budgets, levels, ladder",
    ),
    "damaged tokenizer": (
        lambda c: (c.model / "tokenizer.json").write_text('{"version":\n'),
        BundleCorruptError,
        r"model/tokenizer.json: not a tokenizer file",
    ),
    "text file missing": (
        lambda c: c.text(None),
        CheckpointError,
        r"text.txt: expected a UTF-8 text file .*No such file",
    ),
    "text file too small": (
        lambda c: c.text(b"one\ntwo\n"),
        CheckpointError,
        r"text.txt: 2 different texts; expected at least 200, one per line",
    ),
    "text file binary": (
        lambda c: c.text(bytes(range(256)) * 10),
        CheckpointError,
        r"text.txt: expected a UTF-8 text file with one text per line",
    ),
}


@pytest.mark.parametrize(("damage", "error", "message"), MODELS.values(), ids=MODELS)
def test_models(case: Case, damage: Callable[[Case], object], error: type[NestforgeError], message: str) -> None:
    damage(case)
    refusal = case.refused()
    assert type(refusal) is error
    assert re.search(message, str(refusal)), str(refusal)


@pytest.mark.parametrize(("damage", "error", "message"), PROFILES.values(), ids=PROFILES)
def test_profiles(case: Case, damage: Callable[[Case], object], error: type[NestforgeError], message: str) -> None:
    damage(case)
    refusal = case.refused()
    assert type(refusal) is error
    assert re.search(message, str(refusal)), str(refusal)


@pytest.fixture(scope="module")
def templates(model: Path) -> dict[Bucket, Any]:
    """Traces are not what is wrong here, so they are made once."""
    universal = load_universal(open_source(model))
    return {bucket: template_of(universal, bucket) for bucket in (Bucket(2, 8), Bucket(1, 1))}


@pytest.mark.parametrize(("damage", "error", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments(
    case: Case,
    templates: dict[Bucket, Any],
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Case], object],
    error: type[NestforgeError],
    message: str,
) -> None:
    monkeypatch.setattr(templates_module, "traced_template", lambda _u, _m, _i, bucket, _o: templates[bucket])
    damage(case)
    refusal = case.refused()
    assert type(refusal) is error
    assert re.search(message, str(refusal)), str(refusal)


def test_text_without_tokenizer(case: Case, text: Path) -> None:
    (case.model / "tokenizer.json").unlink()
    case.arguments["text"] = text
    assert "no tokenizer.json, so the text file cannot be read by this model" in str(case.refused())


def test_a_tokenizer_that_knows_more_than_the_model(case: Case, tmp_path: Path, text: Path) -> None:
    case.model = save_tiniest(tmp_path / "inputs" / "small", vocab_size=10)
    _tokenizer(64).save(str(case.model / "tokenizer.json"))
    case.arguments["text"] = text
    assert "input input_ids: values 0..23, expected 0..9" in str(case.refused())


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_an_output_that_exists(case: Case, kind: str) -> None:
    match kind:
        case "folder":
            case_path = case.output
            case_path.mkdir()
            (case_path / "mine").touch()
        case "file":
            case.output.touch()
        case _:
            case.output.symlink_to("nowhere")
    refusal = case.refused()
    assert str(refusal) == f"{case.output}: exists already; choose another --output or remove it"
    assert type(refusal) is OutputError


def test_a_folder_that_is_not_ours_in_the_place_of_the_stage(case: Case) -> None:
    mine = case.output.with_name("out.partial")
    mine.mkdir()
    (mine / "thesis").touch()
    assert "out.partial: not a folder that a compile left" in str(case.refused())
    assert (mine / "thesis").exists()


def test_an_output_below_a_file(case: Case) -> None:
    (case.output.parent / "file").touch()
    case.output = case.output.parent / "file" / "out"
    with pytest.raises(OutputError, match=r"out: cannot be written \(Not a directory\)$"):
        compile_bundle(case.model, case.profile, case.output)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
def test_a_folder_that_cannot_be_written(case: Case) -> None:
    """As another user, who may read what is needed and enter the folder, but not write in it."""
    for path in case.model.iterdir():
        path.chmod(0o755 if path.is_dir() else 0o644)
    modes = {folder: folder.stat().st_mode for folder in (*case.model.parents, case.output.parent)}
    for folder, mode in modes.items():
        folder.chmod(mode | 0o055)
    os.seteuid(65534)
    try:
        refusal = case.refused()
    finally:
        os.seteuid(0)
        for folder, mode in modes.items():
            folder.chmod(mode)
    assert str(refusal) == f"{case.output}: cannot be written (Permission denied)"


@pytest.mark.parametrize("limit", [100, 4_000, 20_000])
def test_a_disk_that_takes_no_more(
    case: Case, templates: dict[Bucket, Any], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """The system refuses to write beyond ``limit`` bytes of a file: the key, a graph, the weight store, in turn."""
    monkeypatch.setattr(templates_module, "traced_template", lambda _u, _m, _i, bucket, _o: templates[bucket])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        refusal = case.refused()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(refusal) == f"{case.output}: cannot be written (File too large)"


def test_the_command_line_prints_one_line_and_exits_with_1(case: Case) -> None:
    truncate(case, 0.5)
    case.yaml()
    result = CliRunner().invoke(
        main, ["compile", str(case.model), "--profile", case.profile, "--output", str(case.output)]
    )
    assert result.exit_code == 1
    assert result.stdout == ""
    assert re.fullmatch(r"nestforge: error: .*model.safetensors: not a whole safetensors file .*\n", result.stderr)
    assert list(case.output.parent.iterdir()) == []
