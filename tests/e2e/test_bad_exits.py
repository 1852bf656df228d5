"""Every kind of bad input around early exit, as a user meets it: one clear line, exit code 1 or 2, nothing written."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner
from cost_eff_models import save_tiny
from exit_bundles import requests, write_exits_bundle, write_exits_manifest
from exit_rows import make_rows, write_arrays, write_text_bundle
from nestforge.errors import InputError, SelectionError
from nestforge.runtime.bundle import open_bundle
from nestforge.runtime.calibrate import measure as measure_exits
from nestforge.runtime.exits.calibration import CALIBRATION_NAME
from nestforge.runtime.manifest import MANIFEST_NAME
from nestforge.tools.cli import main

BUDGET = "mean_flops<=3500"


def contents(folder: Path) -> dict[str, object]:
    """Every path below ``folder``, with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refused(folder: Path, *arguments: object, code: int = 1) -> str:
    """The one line with which the command line refuses; nothing in ``folder`` may have changed."""
    before = contents(folder)
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.exit_code, result.stderr, result.exception)
    assert result.stdout == ""
    assert contents(folder) == before, "something was left behind"
    if code == 2:
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
        return line
    match = re.fullmatch(r"(?:[a-z ]+: \d+/\d+\n)*nestforge: error: ([^\n]{1,800})\n", result.stderr)  # after progress
    assert match, result.stderr
    return match[1]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """How long things take is not looked at here, so each is timed once."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_SAMPLES", "_LEAST_ROUNDS", "_MOST_ROUNDS"):
            patch.setattr(measure_exits, name, 1)
        yield


# Models


class Folder:
    """A model folder to damage."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _change(self, name: str, changes: Mapping[str, Any]) -> None:
        file = self.path / name
        data = json.loads(file.read_text())
        for key, value in changes.items():
            *way, last = key.split(".")
            target = data
            for part in way:
                target = target[part]
            target[last] = value
            if value is ...:
                del target[last]
        file.write_text(json.dumps(data))

    def config(self, **changes: Any) -> None:
        self._change("config.json", changes)

    def sidecar(self, changes: Mapping[str, Any]) -> None:
        self._change("cost_eff.json", changes)

    def write(self, text: str) -> None:
        (self.path / "cost_eff.json").write_text(text)

    def weights(self, change: Callable[[dict[str, np.ndarray]], object]) -> None:
        tensors = safetensors.numpy.load_file(self.path / "model.safetensors")
        change(tensors)
        safetensors.numpy.save_file(tensors, self.path / "model.safetensors")

    def regression(self, **changes: Any) -> None:
        """One class, in the weights too."""
        self.sidecar({"exits.classes": 1, **changes})
        self.weights(lambda w: w.update({name: w[name][:1].copy() for name in list(w) if name.startswith("exits.")}))


def sidecar(**changes: Any) -> Callable[[Folder], None]:
    return lambda folder: folder.sidecar({key.replace("__", "."): value for key, value in changes.items()})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Folder:
    return Folder(Path(shutil.copytree(tiny, tmp_path / "m")))


MODELS: dict[str, tuple[Callable[[Folder], object], str]] = {
    "no sidecar": (lambda f: (f.path / "cost_eff.json").unlink(), "no such file; a model folder needs it"),
    "no JSON": (lambda f: f.write("{'exits': 1}"), "not JSON ("),
    "a list": (lambda f: f.write("[]"), "expected a JSON object, got list"),
    "another schema": (sidecar(schema_version=2), "schema_version '2', expected 1"),
    "unknown key": (sidecar(exit={}), "unknown key 'exit'; did you mean 'exits'?"),
    "no exits": (sidecar(exits=...), "missing key 'exits'"),
    "no classes": (sidecar(exits__classes=...), "exits: missing key 'classes'"),
    "no layers": (
        sidecar(exits__layers=[]),
        "exits: layers: expected layer counts that increase from at least 1, got []",
    ),
    "layers that fall": (
        sidecar(exits__layers=[3, 1, 4]),
        "exits: layers: expected layer counts that increase from at least 1, got [3, 1, 4]",
    ),
    "an exit before the first layer": (
        sidecar(exits__layers=[0, 4]),
        "exits: layers: expected layer counts that increase from at least 1, got [0, 4]",
    ),
    "a layer behind the last exit": (
        sidecar(exits__layers=[1, 3]),
        "gate: tau: expected 1 numbers, one for every exit but the last, or a number for all; got a list of 2",
    ),
    "an exit behind the last layer": (
        sidecar(exits__layers=[1, 3, 5]),
        "exits: the last one is after layer 5, but config.json has num_hidden_layers 4; a layer behind the",
    ),
    "unknown pool": (
        sidecar(exits__pool="max"),
        "exits: pool: got 'max'; expected one of cls, mean, mean_with_padding",
    ),
    "unknown activation": (
        sidecar(exits__activation="relu"),
        "exits: activation: got 'relu'; expected one of none, tanh",
    ),
    "several layers an exit": (
        sidecar(exits__last_n=2),
        "exits: last_n: expected 1, got 2: an exit reads the state of its own layer alone",
    ),
    "no classes at all": (sidecar(exits__classes=0), "exits: classes: expected at least 1, got 0"),
    "classes as text": (sidecar(exits__classes="3"), "exits: classes: expected a whole number, got str '3'"),
    "other classes than the weights": (
        sidecar(exits__classes=5),
        "tensor exits.1.weight has shape [3, 32]; expected [5, 32] as config.json and cost_eff.json say of",
    ),
    "other rank than the weights": (
        sidecar(embedding__rank=8),
        "tensor embeddings.word_embeddings.weight has shape [64, 16]; expected [64, 8] as config.json and",
    ),
    "factorised without a rank": (sidecar(embedding__rank=...), "embedding: mode factorised needs a rank"),
    "dense with a rank": (sidecar(embedding__mode="dense"), "embedding: mode dense has no rank"),
    "an exit without a head": (
        lambda f: f.weights(lambda w: w.pop("exits.3.weight")),
        "the exit after layer 3 has no head: tensor exits.3.weight is missing from the weights",
    ),
    "an exit without a bias": (
        lambda f: f.weights(lambda w: w.pop("exits.1.bias")),
        "the exit after layer 1 has no head: tensor exits.1.bias is missing from the weights",
    ),
    "a head of another size": (
        lambda f: f.weights(lambda w: w.update({"exits.3.weight": np.zeros((3, 31), np.float32)})),
        "tensor exits.3.weight has shape [3, 31]; expected [3, 32] as config.json and cost_eff.json say of",
    ),
    "a head that is not finite": (
        lambda f: f.weights(lambda w: w["exits.3.bias"].fill(np.nan)),
        "tensor exits.3.bias holds NaN or infinite values",
    ),
    "an exit that the weights have not": (
        sidecar(exits__layers=[2, 3, 4]),
        "the exit after layer 2 has no head: tensor exits.2.weight is missing from the weights",
    ),
    "too few thresholds": (
        sidecar(gate__tau=[0.4]),
        "gate: tau: expected 2 numbers, one for every exit but the last, or a number for all; got a list of 1",
    ),
    "a threshold for the last exit": (
        sidecar(gate__tau=[0.4, 0.3, 0.2]),
        "gate: tau: expected 2 numbers, one for every exit but the last, or a number for all; got a list of 3",
    ),
    "a threshold that is no number": (
        sidecar(gate__tau=["0.4", 0.3]),
        "gate: tau[0]: expected a number, got str '0.4'",
    ),
    "a threshold that is NaN": (sidecar(gate__tau=float("nan")), "gate: tau: expected a finite number, got nan"),
    "a threshold that is infinite": (
        sidecar(gate__tau=[float("inf"), 0.3]),
        "gate: tau[0]: expected a finite number, got inf",
    ),
    "a threshold that is true": (sidecar(gate__tau=True), "gate: tau: expected a number, got bool True"),
    "another criterion": (sidecar(gate__criterion="margin"), "gate: criterion: got 'margin'; expected one of entropy"),
    "another comparison": (sidecar(gate__compare=">"), "gate: compare: got '>'; expected one of <, <="),
    "another rule": (sidecar(gate__rule="batch_max"), "gate: rule: got 'batch_max'; expected one of per_row"),
    "a gate without thresholds": (sidecar(gate__tau=...), "gate: missing key 'tau'"),
    "a regression with a gate": (
        lambda f: f.regression(),
        "gate: an exit with 1 class is a regression, whose softmax has no entropy; remove the gate",
    ),
    "a regression by its problem type": (
        lambda f: f.config(problem_type="regression"),
        "gate: config.json has problem_type regression, for which softmax entropy is undefined; remove the",
    ),
    "labels that do not exclude each other": (
        lambda f: f.config(problem_type="multi_label_classification"),
        "gate: config.json has problem_type multi_label_classification, for which softmax entropy is",
    ),
    "an unknown problem type": (
        lambda f: f.config(problem_type="ranking"),
        "problem_type: got 'ranking'; expected one of multi_label_classification, regression,",
    ),
    "kept heads of some layers": (
        sidecar(kept_heads={"0": [0]}),
        "kept_heads: layer 1 is missing; list every layer, with all its ids if it is whole",
    ),
    "kept heads that are not there": (
        sidecar(kept_heads={"0": [0, 3], "1": [0], "2": [], "3": [0]}),
        "kept_heads.0: id 3 is outside 0..2, the stored heads",
    ),
    "widths of fewer layers": (
        lambda f: f.config(num_attention_heads=[3, 4]),
        "num_attention_heads: expected 4 numbers, one per layer, got 2",
    ),
    "widths that the weights have not": (
        lambda f: f.config(intermediate_size=[48, 64, 40, 8]),
        "tensor encoder.layer.3.intermediate.dense.weight is missing from the weights",
    ),
}


@pytest.mark.parametrize(("damage", "message"), MODELS.values(), ids=MODELS)
def test_models(folder: Folder, profile: Path, damage: Callable[[Folder], object], message: str) -> None:
    damage(folder)
    output = folder.path.parent / "out"
    found = refused(folder.path.parent, "compile", folder.path, "--profile", profile, "--output", output)
    assert message in found
    assert found.startswith(str(folder.path)), "the line says where"


@pytest.mark.parametrize("asked", ["2", "9", "0", "-1", "3,2"])
def test_compiling_at_a_layer_without_an_exit(folder: Folder, profile: Path, asked: str) -> None:
    output = folder.path.parent / "out"
    found = refused(
        folder.path.parent, "compile", folder.path, "--profile", profile, "--output", output, "--exits", asked
    )
    layer = asked.split(",")[-1]
    assert found == f"exits: this model has no exit after layer {layer}; it has 1, 3, 4"


@pytest.mark.parametrize("asked", ["x", "", "1,,3", "1.5"])
def test_exits_that_are_no_layers(folder: Folder, profile: Path, asked: str) -> None:
    output = folder.path.parent / "out"
    found = refused(
        folder.path.parent, "compile", folder.path, "--profile", profile, "--output", output, "--exits", asked, code=2
    )
    assert f"'--exits': {asked!r}: expected numbers of layers, such as 3,6,9" in found


def test_exits_of_a_model_that_has_none(model: Path, profile: Path, tmp_path: Path) -> None:
    found = refused(tmp_path, "compile", model, "--profile", profile, "--output", tmp_path / "out", "--exits", "1,2")
    assert found == f"{model}: exits [1, 2] asked for, but this model has none"


# Requests


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_bundle(tmp_path_factory.mktemp("bundles") / "exits.bundle")


@pytest.fixture
def bundle(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "own.bundle"))


@pytest.mark.parametrize(
    ("exits", "message"),
    [
        ("0.1,0.2,0.3", "thresholds: expected one number, or 2 (one for every exit but the last), got 3"),
        ("nan", "thresholds: expected numbers in nats, got nan"),
        ("0.1,nan", "thresholds: expected numbers in nats, got nan"),
        ("lean", "exits 'lean': bundle BUNDLE has no calibration.json; run `nestforge calibrate`, or ask for thr"),
        ("", "exits '': bundle BUNDLE has no calibration.json; run `nestforge calibrate`, or ask for thresholds"),
        ("0.1,", "exits '0.1,': bundle BUNDLE has no calibration.json"),
        ("0.1;0.2", "exits '0.1;0.2': bundle BUNDLE has no calibration.json"),
    ],
)
def test_thresholds_asked_for(bundle: Path, exits: str, message: str) -> None:
    found = refused(bundle, "run", bundle, "--text", "w1 w2", "--exits", exits)
    assert found.startswith(message.replace("BUNDLE", str(bundle)))


def test_thresholds_of_a_shallow_submodel(bundle: Path) -> None:
    found = refused(bundle, "run", bundle, "--text", "w1 w2", "--submodel", "S", "--exits", "0.1,0.2")
    assert found == "thresholds: expected one number, or 1 (one for every exit but the last), got 2"


def test_exits_of_a_bundle_that_has_none(bundle: Path, tmp_path: Path) -> None:
    without_exits(bundle)
    found = refused(tmp_path, "run", bundle, "--text", "w1", "--exits", "0.1")
    assert found == "exits: this model has no exits to leave at; expected none or 'off', got 0.1"
    arrays = write_arrays(tmp_path / "rows.npz", 20)
    found = refused(tmp_path, "calibrate", bundle, "--data", arrays, "--budget", BUDGET)
    assert found == f"bundle {bundle}: this model has no exits to leave at; nothing to calibrate"


@pytest.mark.parametrize(
    ("lengths", "width", "message"),
    [
        ([3] * 9, 16, "input of 9 rows x 16 is larger than every bucket of this bundle (b1-s8, b1-s16, b4-s8"),
        ([3], 17, "input of 1 rows x 17 is larger than every bucket of this bundle (b1-s8, b1-s16, b4-s8"),
        ([], 8, "input input_ids: expected int64 [batch, sequence], got shape [0, 8]"),
        ([0], 0, "input input_ids: expected int64 [batch, sequence], got shape [1, 0]"),
    ],
)
@pytest.mark.parametrize("exits", ["off", "0.5"])
def test_shapes(bundle: Path, tmp_path: Path, lengths: list[int], width: int, message: str, exits: str) -> None:
    mask = np.zeros((len(lengths), width), np.int64)
    np.savez(tmp_path / "in.npz", input_ids=mask, attention_mask=mask)
    found = refused(tmp_path, "run", bundle, "--inputs", tmp_path / "in.npz", "--exits", exits)
    assert found.startswith(message)


def test_a_text_of_too_many_tokens(bundle: Path) -> None:
    found = refused(bundle, "run", bundle, "--text", "w1 " * 17, "--exits", "0.5")
    assert found.startswith("text 0: 17 tokens, the largest bucket takes 16; shorten it, pass")


def test_damaged_arrays(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.npz"
    np.savez_compressed(path, **requests([16] * 8))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 4] ^= 0xFF
    path.write_bytes(raw)
    for arguments in (("run", bundle, "--inputs", path), ("calibrate", bundle, "--data", path, "--budget", BUDGET)):
        assert refused(tmp_path, *arguments) == (
            f"{path}: expected an NPZ file of plain arrays, as numpy.savez writes it"
        )


@pytest.mark.parametrize(
    "asked", [(0.1,), [0.1, 0.2, 0.3], float("nan"), 10**400, True, {}, b"lean", np.ones((2, 2)), (0.1, None)]
)
def test_the_api_refuses_what_is_no_threshold(written: Path, asked: Any) -> None:
    with nestforge.load(written, residency="shared", threads=1) as model, pytest.raises(SelectionError) as error:
        model(requests([3]), exits=asked)
    assert re.match(r"(exits|thresholds): expected [^\n]*$", str(error.value)), str(error.value)


def test_the_api_refuses_rows_beyond_every_bucket(written: Path) -> None:
    with (
        nestforge.load(written, residency="shared", threads=1) as model,
        pytest.raises(InputError, match="input of 1 rows x 17 is larger than every bucket"),
    ):
        model(requests([3], 17), exits=0.5)


# Calibrating


def without_exits(bundle: Path) -> None:
    from dataclasses import replace

    manifest = open_bundle(bundle).manifest
    whole = tuple(engine for engine in manifest.engines if engine.segment is None)
    write_exits_manifest(bundle, replace(manifest, exits=None, engines=whole))


def lines(*rows: object) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def arrays(**changes: Any) -> dict[str, Any]:
    return {name: array for name, array in (make_rows(20) | changes).items() if array is not ...}


ROW = {"text": "w1 w2", "label": 0}
DATA: dict[str, tuple[str, bytes | dict[str, Any] | None, str]] = {
    "missing": ("a.jsonl", None, "cannot be read (No such file or directory)"),
    "missing arrays": ("a.npz", None, "cannot be read (No such file or directory)"),
    "of another kind": ("a.csv", b"text,label\n", "expected a file that ends in .npz or .jsonl"),
    "without a kind": ("a", b"", "expected a file that ends in .npz or .jsonl"),
    "empty": ("a.jsonl", b"", "has no rows"),
    "empty arrays": ("a.npz", b"", "expected an NPZ file of plain arrays, as numpy.savez writes it"),
    "a blank line": (
        "a.jsonl",
        lines(ROW) + b"\n" + lines(ROW),
        'line 2: expected a JSON object such as {"text": "...", "label": 0}',
    ),
    "no JSON": (
        "a.jsonl",
        lines(ROW) + b"w1 w2\n",
        'line 2: expected a JSON object such as {"text": "...", "label": 0}',
    ),
    "a list": ("a.jsonl", lines([ROW]), 'line 1: expected a JSON object such as {"text": "...", "label": 0}'),
    "an unknown key": (
        "a.jsonl",
        lines({"text": "w1", "lable": 1}),
        "line 1: unknown key 'lable'; expected 'text' and perhaps 'label'",
    ),
    "no text": ("a.jsonl", lines({"label": 1}), "line 1: expected a 'text', got None"),
    "text that is a number": ("a.jsonl", lines(ROW, {"text": 5, "label": 1}), "line 2: expected a 'text', got 5"),
    "labels from the second on": (
        "a.jsonl",
        lines({"text": "w1"}, ROW),
        "line 1: has no 'label', and other lines have; label all rows or none",
    ),
    "labels of some": (
        "a.jsonl",
        lines(ROW, {"text": "w1"}),
        "line 2: has no 'label', and other lines have; label all rows or none",
    ),
    "a label above the classes": (
        "a.jsonl",
        lines(ROW, {"text": "w1", "label": 3}),
        "line 2: label 3: expected a whole number, 0..2",
    ),
    "a label below": ("a.jsonl", lines({"text": "w1", "label": -1}), "line 1: label -1: expected a whole number, 0..2"),
    "a label that is a name": (
        "a.jsonl",
        lines({"text": "w1", "label": "spam"}),
        "line 1: label 'spam': expected a whole number, 0..2",
    ),
    "a label that is true": (
        "a.jsonl",
        lines({"text": "w1", "label": True}),
        "line 1: label True: expected a whole number, 0..2",
    ),
    "no UTF-8": ("a.jsonl", lines(ROW) + b"\xff\n", "line 2: not UTF-8"),
    "half a character": (
        "a.jsonl",
        b'{"text": "\\ud800"}\n',
        "line 1: 'text' holds half of a surrogate pair, which is no character",
    ),
    "a text that is too long": (
        "a.jsonl",
        lines(ROW, {"text": "w1 " * 17, "label": 0}),
        "line 2: more than 16 tokens, which the largest bucket for such requests takes; shorten it, pass",
    ),
    "no NPZ": ("a.npz", lines(ROW), "expected an NPZ file of plain arrays, as numpy.savez writes it"),
    "an input missing": (
        "a.npz",
        arrays(attention_mask=...),
        "inputs input_ids: expected exactly attention_mask, input_ids",
    ),
    "an array too many": (
        "a.npz",
        arrays(label=np.zeros(20, int)),
        "inputs attention_mask, input_ids, label: expected exactly attention_mask, input_ids",
    ),
    "another dtype": (
        "a.npz",
        arrays(input_ids=np.zeros((20, 16), np.int32)),
        "input input_ids: expected a numpy array of int64, got int32",
    ),
    "another rank": (
        "a.npz",
        arrays(input_ids=np.zeros(20, int)),
        "input input_ids: expected int64 [batch, sequence], got shape [20]",
    ),
    "ids beyond the vocabulary": (
        "a.npz",
        arrays(input_ids=np.full((20, 16), 16)),
        "input input_ids: values 16..16, expected 0..15; do they come from this bundle's own tokenizer?",
    ),
    "labels of other rows": (
        "a.npz",
        arrays(labels=np.zeros(19, int)),
        "labels: expected 20 whole numbers, got int64 of shape [19]",
    ),
    "labels that are fractions": (
        "a.npz",
        arrays(labels=np.zeros(20)),
        "labels: expected 20 whole numbers, got float64 of shape [20]",
    ),
    "labels out of range": ("a.npz", arrays(labels=np.arange(20)), "labels: row 3 has 3, expected 0..2"),
    "no rows": ("a.npz", {name: array[:0] for name, array in arrays().items()}, "has no rows"),
    "objects": (
        "a.npz",
        arrays(labels=np.array([{}] * 20)),
        "expected an NPZ file of plain arrays, as numpy.savez writes it",
    ),
}


@pytest.mark.parametrize(("name", "content", "message"), DATA.values(), ids=DATA)
def test_data(bundle: Path, tmp_path: Path, name: str, content: bytes | dict[str, Any] | None, message: str) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.savez(path, **content)
    found = refused(tmp_path, "calibrate", bundle, "--data", path, "--budget", BUDGET)
    assert found.removeprefix(f"{path}: ").startswith(message)
    assert found.startswith(str(path)), "the line says where"


OPTIONS: dict[str, tuple[list[str], int, str]] = {
    "no budget": (["--budget", "fast"], 1, "budget 'fast': expected METRIC<=NUMBER, such as mean_latency_ms<=5"),
    "no number": (
        ["--budget", "mean_flops<="],
        1,
        "budget 'mean_flops<=': expected METRIC<=NUMBER, such as mean_latency_ms<=5",
    ),
    "below": (
        ["--budget", "mean_flops<5"],
        1,
        "budget 'mean_flops<5': expected METRIC<=NUMBER, such as mean_latency_ms<=5",
    ),
    "a word": (["--budget", "mean_flops<=few"], 1, "budget 'mean_flops<=few': 'few' is not a number"),
    "NaN": (["--budget", "mean_flops<=nan"], 1, "budget mean_flops: expected a positive number, got nan"),
    "infinite": (["--budget", "mean_flops<=inf"], 1, "budget mean_flops: expected a positive number, got inf"),
    "zero": (["--budget", "p95_latency_ms<=0"], 1, "budget p95_latency_ms: expected a positive number, got 0.0"),
    "negative": (["--budget", "p95_latency_ms<=-1"], 1, "budget p95_latency_ms: expected a positive number, got -1.0"),
    "unknown metric": (
        ["--budget", "mean_latency<=5"],
        1,
        "budget 'mean_latency<=5': unknown metric 'mean_latency'; did you mean 'mean_latency_ms'?",
    ),
    "a metric's name in full": (
        ["--budget", "energy_j<=5"],
        1,
        "budget 'energy_j<=5': unknown metric 'energy_j'; expected one of mean_flops, mean_latency_ms,",
    ),
    "out of reach": (
        ["--budget", "mean_flops<=1"],
        1,
        "out of reach; with every row leaving at the first exit it is 1360 FLOPs on this host, the least",
    ),
    "no batch": (["--batch", "0"], 2, "'--batch': 0 is not in the range x>=1."),
    "a batch beyond every bucket": (
        ["--batch", "9"],
        1,
        "batch 9: larger than every bucket of this bundle (b1-s8, b1-s16, b4-s8, b4-s16, b8-s8, b8-s16); ask",
    ),
    "unknown submodel": (
        ["--submodel", "depth3"],
        1,
        "no submodel 'depth3' in this bundle; it has depth2 (S), depth4 (XL)",
    ),
    "a name that reads as a number": (
        ["--name", "0.3"],
        1,
        "name '0.3': expected a letter, then up to 79 of letters, digits and ._<=+-, and none of inf,",
    ),
    "a name that means something": (
        ["--name", "off"],
        1,
        "name 'off': expected a letter, then up to 79 of letters, digits and ._<=+-, and none of inf,",
    ),
    "a name that leaves the folder": (
        ["--name", "../x"],
        1,
        "name '../x': expected a letter, then up to 79 of letters, digits and ._<=+-, and none of inf,",
    ),
    "unknown rule": (["--rule", "alone"], 2, "'--rule': 'alone' is not one of 'per_row', 'batch_max'."),
    "unknown comparison": (["--compare", ">"], 2, "'--compare': '>' is not one of '<', '<='."),
    "truncated arrays": (["--truncate"], 1, "truncate applies to text only; cut the arrays yourself"),
    "a plot of another kind": (["--plot", "a.pdf"], 2, "Error: --plot: expected a file that ends in .svg or .png"),
    "a plot without a kind": (["--plot", "a"], 2, "Error: --plot: expected a file that ends in .svg or .png"),
    "a plot in no folder": (["--plot", "nowhere/a.svg"], 1, "nowhere/a.svg: cannot be written (no such folder)"),
}


@pytest.mark.parametrize(("options", "code", "message"), OPTIONS.values(), ids=OPTIONS)
def test_options(bundle: Path, tmp_path: Path, options: list[str], code: int, message: str) -> None:
    path = write_arrays(tmp_path / "rows.npz", 20)
    if "--budget" not in options:
        options = ["--budget", BUDGET, *options]
    found = refused(tmp_path, "calibrate", bundle, "--data", path, *options, code=code)
    assert message in found


def test_fewer_rows_than_a_request(bundle: Path, tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "rows.npz", 3)
    found = refused(tmp_path, "calibrate", bundle, "--data", path, "--budget", BUDGET, "--batch", "4")
    assert found == "3 rows are less than one request of 4; send more, or choose smaller requests"


@pytest.mark.parametrize("name", ["a.svg", "a.PNG"])
def test_a_plot_that_exists(bundle: Path, tmp_path: Path, name: str) -> None:
    path, plot = write_arrays(tmp_path / "rows.npz", 20), tmp_path / name
    plot.touch()
    found = refused(tmp_path, "calibrate", bundle, "--data", path, "--budget", BUDGET, "--plot", plot)
    assert found == f"{plot}: exists already; choose another file"


@contextmanager
def nobody(*readable: Path) -> Iterator[None]:
    """As a user without rights, who may read ``readable`` and what is in it."""
    modes = {each: each.stat().st_mode for path in readable for each in (path, *path.parents, *path.glob("*"))}
    for each, mode in modes.items():
        each.chmod(mode | (0o055 if each.is_dir() else 0o044))
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        for each, mode in modes.items():
            each.chmod(mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
def test_a_bundle_that_cannot_be_written(bundle: Path, tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "rows.npz", 20)
    with nobody(bundle, path.parent):
        found = refused(tmp_path, "calibrate", bundle, "--data", path, "--budget", BUDGET)
    assert found == f"{bundle}: cannot be written, so a calibration could not be kept"


# What was kept, and what was compiled


@pytest.fixture(scope="module")
def kept(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated bundle."""
    folder = tmp_path_factory.mktemp("calibrated")
    bundle = Path(shutil.copytree(written, folder / "own.bundle"))
    path = write_arrays(folder / "rows.npz", 20)
    arguments = ["calibrate", bundle, "--data", path, "--budget", BUDGET, "--name", "lean"]
    assert CliRunner().invoke(main, list(map(str, arguments))).exit_code == 0
    return bundle


@pytest.fixture
def calibrated(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "own.bundle"))


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def edit(raw: bytes) -> bytes:
        data = json.loads(raw)
        change(data)
        return json.dumps(data).encode()

    return edit


def first(**changes: Any) -> Callable[[bytes], bytes]:
    return edited(lambda data: data["policies"][0].update(changes))


CALIBRATIONS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "not JSON ("),
    "cut off": (lambda raw: raw[: len(raw) // 2], "not JSON ("),
    "binary": (lambda _: bytes(range(256)), "not JSON ("),
    "a list": (lambda _: b"[]", "schema_version 'None', expected 1"),
    "another schema": (edited(lambda data: data.update(schema_version=2)), "schema_version '2', expected 1"),
    "unknown key": (edited(lambda data: data.update(policy={})), "unknown key 'policy'; did you mean 'policies'?"),
    "no policies": (edited(lambda data: data.pop("policies")), "missing key 'policies'"),
    "a key twice": (
        lambda raw: raw.replace(b'"schema_version"', b'"policies": [], "schema_version"'),
        "not JSON (a key stands twice among defaults, manifest_sha256, policies, policies, schema_version)",
    ),
    "of another bundle": (
        edited(lambda data: data.update(manifest_sha256="0" * 64)),
        "belongs to another manifest than this bundle's",
    ),
    "unknown submodel": (first(submodel="depth3"), "policy 'lean' of 'depth3': no such submodel in this bundle"),
    "too few thresholds": (first(thresholds=[0.3]), "policy 'lean' of 'depth4': 1 thresholds, expected 2"),
    "too many thresholds": (first(thresholds=[0.3, 0.2, 0.1]), "policy 'lean' of 'depth4': 3 thresholds, expected 2"),
    "a threshold that is text": (
        first(thresholds=["0.3", 0.2]),
        "policies[0]: thresholds[0]: expected a number, got str '0.3'",
    ),
    "a threshold that is NaN": (first(thresholds=[float("nan"), 0.2]), "not JSON (NaN is not a JSON number)"),
    "a threshold beyond numbers": (
        lambda raw: re.sub(rb'("thresholds": \[\s*)[^\s,]+', rb"\g<1>1e999", raw),
        "policies[0]: thresholds[0]: expected a finite number, got inf",
    ),
    "another comparison": (first(compare=">"), "policies[0]: compare: got '>'; expected one of <, <="),
    "another rule": (first(rule="row"), "policies[0]: rule: got 'row'; did you mean 'per_row'?"),
    "a histogram of fewer exits": (
        first(histogram=[10, 10]),
        "policy 'lean' of 'depth4': histogram [10, 10], expected counts of 3 exits",
    ),
    "a histogram of nothing": (
        first(histogram=[0, 0, 0]),
        "policy 'lean' of 'depth4': histogram [0, 0, 0], expected counts of 3 exits",
    ),
    "a histogram below zero": (first(histogram=[-1, 10, 10]), "policies[0]: histogram[0]: expected at least 0, got -1"),
    "a name that means something": (first(name="off"), "policy 'off' of 'depth4': not a name that a policy may have"),
    "a default that is not there": (
        edited(lambda data: data.update(defaults={"depth4": "fast"})),
        "defaults: no policy 'fast' of submodel 'depth4'",
    ),
    "a default of no submodel": (
        edited(lambda data: data.update(defaults={"depth3": "lean"})),
        "defaults: no policy 'lean' of submodel 'depth3'",
    ),
    "a policy twice": (
        edited(lambda data: data["policies"].append(data["policies"][0])),
        "policy 'lean' of 'depth4': stands twice",
    ),
}


@pytest.mark.parametrize(("change", "message"), CALIBRATIONS.values(), ids=CALIBRATIONS)
def test_calibrations(calibrated: Path, tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    path = calibrated / CALIBRATION_NAME
    path.write_bytes(change(path.read_bytes()))
    rows = write_arrays(tmp_path / "rows.npz", 20)
    for arguments in (
        ("run", calibrated, "--text", "w1"),
        ("run", calibrated, "--text", "w1", "--exits", "off"),
        ("calibrate", calibrated, "--data", rows, "--budget", BUDGET),
    ):
        found = refused(tmp_path, *arguments)
        assert found.removeprefix(f"{path}: ").startswith(message)
        assert found.startswith(str(path)), "the line says where"
        assert re.search(r"; (remove it and calibrate again|use the nestforge release that wrote it, or calib)", found)


def test_a_calibration_that_is_a_link_or_a_folder(calibrated: Path, tmp_path: Path) -> None:
    path = calibrated / CALIBRATION_NAME
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    assert refused(tmp_path, "run", calibrated, "--text", "w1").startswith(f"{path}: expected a regular file")
    path.unlink()
    path.mkdir()
    assert refused(tmp_path, "run", calibrated, "--text", "w1").startswith(f"{path}: expected a regular file")


def test_a_policy_of_another_name_or_submodel(calibrated: Path, tmp_path: Path) -> None:
    found = refused(tmp_path, "run", calibrated, "--text", "w1", "--exits", "fast")
    assert found == "no calibrated exits 'fast' of submodel depth4; it has lean"
    found = refused(tmp_path, "run", calibrated, "--text", "w1", "--exits", "lean", "--submodel", "S")
    assert found == "no calibrated exits 'lean' of submodel depth2; it has none"


def drop_engines(data: dict[str, Any], keep: Callable[[dict[str, Any]], bool]) -> None:
    data["engines"] = [engine for engine in data["engines"] if keep(engine)]


def swap_layers(data: dict[str, Any]) -> None:
    segments = data["exits"]["segments"]
    segments[0], segments[1] = segments[1], segments[0]


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no exits": (lambda d: d.pop("exits"), "engine depth2.to1@b1-s8: segment 'to1', but this manifest has no exits"),
    "one segment": (
        lambda d: d["exits"].update(segments=d["exits"]["segments"][-1:]),
        "exits: segments end at layers [4]; expected at least two, rising",
    ),
    "a segment missing": (
        lambda d: d["exits"]["segments"].pop(1),
        "exits: segments end at layers [1, 4], axis depth has [1, 2, 4]",
    ),
    "segments that fall": (swap_layers, "exits: segments end at layers [2, 1, 4]; expected at least two, rising"),
    "a segment twice": (
        lambda d: d["exits"]["segments"][1].update(name="to1"),
        "exits: segments are named ['to1', 'to1', 'to4']; expected names that differ",
    ),
    "a segment behind the last layer": (
        lambda d: d["exits"]["segments"][2].update(layer=5),
        "exits: segments end at layers [1, 2, 5], axis depth has [1, 2, 4]",
    ),
    "no engines of a segment": (
        lambda d: drop_engines(d, lambda e: e.get("segment") != "to2"),
        "submodel depth2 at b1-s8: has segments, but no to2",
    ),
    "an engine of a segment missing": (
        lambda d: drop_engines(d, lambda e: e["id"] != "depth4.to2@b4-s8"),
        "submodel depth4 at b4-s8: has segments, but no to2",
    ),
    "an engine of an unknown segment": (
        lambda d: d["engines"][1].update(segment="to9"),
        "engine depth2.to1@b1-s8: segment 'to9' is not in this manifest",
    ),
    "a segment without its bytes": (
        lambda d: d["engines"][1].pop("weight_bytes"),
        "engine depth2.to1@b1-s8: a segment without weight_bytes",
    ),
    "engines of one file that differ": (
        lambda d: d["engines"][1].update(flops=7),
        "engine depth4.to1@b1-s8: differs from another engine of its file to1.b1-s8.onnx in more than its",
    ),
    "other classes": (
        lambda d: d["exits"].update(classes=4),
        "outputs are logits float32 [batch, 3], entropy float32 [batch]; expected those of an exit, logits",
    ),
    "one class": (lambda d: d["exits"].update(classes=1), "exits: classes: expected at least 2, got 1"),
    "unknown logits": (
        lambda d: d["exits"].update(logits="scores"),
        "outputs are logits float32 [batch, 3], entropy float32 [batch]; expected those of an exit, scores",
    ),
    "unknown mask": (
        lambda d: d["exits"].update(mask="mask"),
        "exits: mask 'mask' is not an input of whole numbers [batch, sequence]",
    ),
    "unknown state": (
        lambda d: d["exits"].update(state_out="hidden"),
        "exits: 'hidden' is not an output [batch, sequence, H] of segment to1",
    ),
    "a state of another width": (
        lambda d: d["exits"]["segments"][1]["inputs"][0]["dims"].__setitem__(2, 5),
        "segment to2: inputs are state float32 [batch, sequence, 5], attention_mask int64 [batch, sequence];",
    ),
    "too few thresholds": (
        lambda d: d["exits"]["gate"].update(thresholds=[0.1]),
        "exits: 1 thresholds, expected 2, for all but the last",
    ),
    "another comparison": (
        lambda d: d["exits"]["gate"].update(compare="="),
        "exits: gate: compare: got '='; did you mean '<='?",
    ),
    "trims that is a number": (lambda d: d["exits"].update(trims=1), "exits: trims: expected true or false, got int 1"),
    "unknown key": (
        lambda d: d["exits"].update(threshold=1),
        "exits: unknown key 'threshold'; expected one of classes, entropy, gate, logits, mask, segments,",
    ),
    "depths that are no exits": (
        lambda d: d["axes"][0].update(choices=[1, 3, 4]),
        "submodel depth2: axis depth: expected one of 1, 3, 4, got 2",
    ),
    "schema 3": (lambda d: d.update(schema_version=3), "schema_version '3', expected 1 or 2"),
}


@pytest.mark.parametrize(("change", "message"), MANIFESTS.values(), ids=MANIFESTS)
def test_manifests(bundle: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    data = json.loads((bundle / MANIFEST_NAME).read_text())
    change(data)
    write_exits_manifest(bundle, data)
    rows = write_arrays(tmp_path / "rows.npz", 20)
    for arguments in (
        ("run", bundle, "--text", "w1"),
        ("inspect", bundle),
        ("verify", bundle),
        ("calibrate", bundle, "--data", rows, "--budget", BUDGET),
    ):
        found = refused(tmp_path, *arguments)
        assert found.startswith(f"{bundle / MANIFEST_NAME}: {message}")


@pytest.mark.parametrize("name", ["to2.b1-s8.onnx", "to4.b4-s16.onnx"])
def test_segment_files_that_are_gone_or_cut(bundle: Path, tmp_path: Path, name: str) -> None:
    whole = (bundle / name).read_bytes()
    (bundle / name).write_bytes(whole[:-1])
    found = refused(tmp_path, "run", bundle, "--text", "w1")
    assert found.startswith(f"{bundle / name}: {len(whole) - 1} bytes, expected {len(whole)}; fetch the bundle again")
    (bundle / name).unlink()
    assert refused(tmp_path, "run", bundle, "--text", "w1").startswith(f"{bundle / name}: missing; fetch the bundle")


def test_a_segment_of_another_interface_under_the_same_name(tmp_path: Path) -> None:
    """Sizes mended: what is found when the engine is opened."""
    bundle = write_exits_bundle(tmp_path / "b")
    shutil.copy(bundle / "to4.b1-s8.onnx", bundle / "to2.b1-s8.onnx")
    data = json.loads((bundle / MANIFEST_NAME).read_text())
    for entry in data["files"]:
        entry["bytes"] = (bundle / entry["path"]).stat().st_size
    write_exits_manifest(bundle, data)
    np.savez(tmp_path / "in.npz", **requests([3]))
    found = refused(tmp_path, "run", bundle, "--inputs", tmp_path / "in.npz", "--exits", "-1")
    assert found.startswith("engine depth4.to2@b1-s8: outputs are ")
