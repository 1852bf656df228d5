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
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


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
    match = re.fullmatch(r"nestforge: error: ([^\n]{1,800})\n", result.stderr)
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
        self.weights(
            lambda w: w.update({name: w[name][:1].copy() for name in list(w) if name.startswith("exits.")})
        )


def sidecar(**changes: Any) -> Callable[[Folder], None]:
    return lambda folder: folder.sidecar({key.replace("__", "."): value for key, value in changes.items()})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Folder:
    return Folder(Path(shutil.copytree(tiny, tmp_path / "m")))


MODELS: dict[str, tuple[Callable[[Folder], object], str]] = {
    "no sidecar": (lambda f: (f.path / "cost_eff.json").unlink(), "X"),
    "no JSON": (lambda f: f.write("{'exits': 1}"), "X"),
    "a list": (lambda f: f.write("[]"), "X"),
    "another schema": (sidecar(schema_version=2), "X"),
    "unknown key": (sidecar(exit={}), "X"),
    "no exits": (sidecar(exits=...), "X"),
    "no classes": (sidecar(exits__classes=...), "X"),
    "no layers": (sidecar(exits__layers=[]), "X"),
    "layers that fall": (sidecar(exits__layers=[3, 1, 4]), "X"),
    "an exit before the first layer": (sidecar(exits__layers=[0, 4]), "X"),
    "a layer behind the last exit": (sidecar(exits__layers=[1, 3]), "X"),
    "an exit behind the last layer": (sidecar(exits__layers=[1, 3, 5]), "X"),
    "unknown pool": (sidecar(exits__pool="max"), "X"),
    "unknown activation": (sidecar(exits__activation="relu"), "X"),
    "several layers an exit": (sidecar(exits__last_n=2), "X"),
    "no classes at all": (sidecar(exits__classes=0), "X"),
    "classes as text": (sidecar(exits__classes="3"), "X"),
    "other classes than the weights": (sidecar(exits__classes=5), "X"),
    "other rank than the weights": (sidecar(embedding__rank=8), "X"),
    "factorised without a rank": (sidecar(embedding__rank=...), "X"),
    "dense with a rank": (sidecar(embedding__mode="dense"), "X"),
    "an exit without a head": (lambda f: f.weights(lambda w: w.pop("exits.3.weight")), "X"),
    "an exit without a bias": (lambda f: f.weights(lambda w: w.pop("exits.1.bias")), "X"),
    "a head of another size": (
        lambda f: f.weights(lambda w: w.update({"exits.3.weight": np.zeros((3, 31), np.float32)})),
        "X",
    ),
    "a head that is not finite": (lambda f: f.weights(lambda w: w["exits.3.bias"].fill(np.nan)), "X"),
    "an exit that the weights have not": (sidecar(exits__layers=[2, 3, 4]), "X"),
    "too few thresholds": (sidecar(gate__tau=[0.4]), "X"),
    "a threshold for the last exit": (sidecar(gate__tau=[0.4, 0.3, 0.2]), "X"),
    "a threshold that is no number": (sidecar(gate__tau=["0.4", 0.3]), "X"),
    "a threshold that is NaN": (sidecar(gate__tau=float("nan")), "X"),
    "a threshold that is infinite": (sidecar(gate__tau=[float("inf"), 0.3]), "X"),
    "a threshold that is true": (sidecar(gate__tau=True), "X"),
    "another criterion": (sidecar(gate__criterion="margin"), "X"),
    "another comparison": (sidecar(gate__compare=">"), "X"),
    "another rule": (sidecar(gate__rule="batch_max"), "X"),
    "a gate without thresholds": (sidecar(gate__tau=...), "X"),
    "a regression with a gate": (lambda f: f.regression(), "X"),
    "a regression by its problem type": (lambda f: f.config(problem_type="regression"), "X"),
    "labels that do not exclude each other": (lambda f: f.config(problem_type="multi_label_classification"), "X"),
    "an unknown problem type": (lambda f: f.config(problem_type="ranking"), "X"),
    "kept heads of some layers": (sidecar(kept_heads={"0": [0]}), "X"),
    "kept heads that are not there": (sidecar(kept_heads={"0": [0, 3], "1": [0], "2": [], "3": [0]}), "X"),
    "widths of fewer layers": (lambda f: f.config(num_attention_heads=[3, 4]), "X"),
    "widths that the weights have not": (lambda f: f.config(intermediate_size=[48, 64, 40, 8]), "X"),
}
