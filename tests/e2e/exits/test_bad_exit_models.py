"""Multi-exit model folders that cannot be compiled: one line each, nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from support.cost_eff_models import save_tiny
from support.refusals import refused, says


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


def config(**changes: Any) -> Callable[[Folder], None]:
    return lambda folder: folder.config(**changes)


def sidecar(**changes: Any) -> Callable[[Folder], None]:
    return lambda folder: folder.sidecar({key.replace("__", "."): value for key, value in changes.items()})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Folder:
    return Folder(Path(shutil.copytree(tiny, tmp_path / "m")))


MODELS: dict[str, tuple[Callable[[Folder], object], str]] = {
    "no sidecar": (lambda f: (f.path / "cost_eff.json").unlink(), "cannot be read (No such file"),
    "no JSON": (lambda f: f.write("{'exits': 1}"), "not JSON ("),
    "a list": (lambda f: f.write("[]"), "expected a JSON object, got list"),
    "another schema": (sidecar(schema_version=2), "schema_version '2', expected 1"),
    "unknown key": (sidecar(exit={}), "unknown key 'exit'; did you mean 'exits'?"),
    "no exits": (sidecar(exits=...), "missing key 'exits'"),
    "no classes": (sidecar(exits__classes=...), "exits: missing key 'classes'"),
    "no layers": (sidecar(exits__layers=[]), "exits: layers: expected [...] at least 1, got []"),
    "layers that fall": (sidecar(exits__layers=[3, 1, 4]), "exits: layers: [...] at least 1, got [3, 1, 4]"),
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
    "unknown pool": (sidecar(exits__pool="max"), "exits: pool: got 'max'; [...], mean_with_padding"),
    "unknown activation": (sidecar(exits__activation="relu"), "exits: activation: got 'relu'; [...] none, tanh"),
    "several layers an exit": (sidecar(exits__last_n=2), "exits: last_n: expected 1, got 2: [...] layer alone"),
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
        "tensor exits.3.weight is missing from the weights",
    ),
    "an exit without a bias": (
        lambda f: f.weights(lambda w: w.pop("exits.1.bias")),
        "tensor exits.1.bias is missing from the weights",
    ),
    "a head of another size": (
        lambda f: f.weights(lambda w: w.update({"exits.3.weight": np.zeros((3, 31), np.float32)})),
        "tensor exits.3.weight has shape [3, 31]; expected [3, 32] as config.json and",
    ),
    "a head that is not finite": (
        lambda f: f.weights(lambda w: w["exits.3.bias"].fill(np.nan)),
        "tensor exits.3.bias holds NaN or infinite values",
    ),
    "an exit that the weights have not": (
        sidecar(exits__layers=[2, 3, 4]),
        "tensor exits.2.weight is missing from the weights",
    ),
    "too few thresholds": (
        sidecar(gate__tau=[0.4]),
        "gate: tau: expected 2 numbers, one for every exit but the last, or a number for all; got a list of 1",
    ),
    "a threshold for the last exit": (
        sidecar(gate__tau=[0.4, 0.3, 0.2]),
        "gate: tau: expected 2 numbers, one for every exit but the last, or a number for all; got a list of 3",
    ),
    "a threshold that is no number": (sidecar(gate__tau=["0.4", 0.3]), "gate: tau[0]: expected [...] got str '0.4'"),
    "a threshold that is NaN": (sidecar(gate__tau=float("nan")), "gate: tau: expected a finite number, got nan"),
    "a threshold that is infinite": (sidecar(gate__tau=[float("inf"), 0.3]), "gate: [...] a finite number, got inf"),
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
        config(problem_type="regression"),
        "gate: config.json has problem_type regression, for which softmax entropy is undefined; remove the",
    ),
    "labels that do not exclude each other": (
        config(problem_type="multi_label_classification"),
        "gate: config.json has problem_type multi_label_classification, for which softmax entropy is",
    ),
    "an unknown problem type": (
        config(problem_type="ranking"),
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
    "widths of fewer layers": (config(num_attention_heads=[3, 4]), "num_attention_heads: [...] one per layer, got 2"),
    "widths that the weights have not": (
        config(intermediate_size=[48, 64, 40, 8]),
        "tensor encoder.layer.3.intermediate.dense.weight is missing from the weights",
    ),
}


@pytest.mark.parametrize(("damage", "message"), MODELS.values(), ids=MODELS)
def test_models(folder: Folder, profile: Path, damage: Callable[[Folder], object], message: str) -> None:
    damage(folder)
    output = folder.path.parent / "out"
    found = refused(folder.path.parent, "compile", folder.path, "--profile", profile, "--output", output)
    assert says(found, f"[...]{message}")
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
    assert f"'--exits': {asked!r}: expected whole numbers with commas between, such as 3,6,9" in found


def test_exits_of_a_model_that_has_none(model: Path, profile: Path, tmp_path: Path) -> None:
    found = refused(tmp_path, "compile", model, "--profile", profile, "--output", tmp_path / "out", "--exits", "1,2")
    assert found == f"{model}: exits [1, 2] requested, but this model has none"
