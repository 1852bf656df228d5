"""OpenVINO as a back end: its runs, its refusals, and engines that are proven by it and opened from a bundle."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.job import resolve
from nestforge.errors import (
    BundleCorruptError,
    BundleIncompatibleError,
    InputError,
    ParityError,
    PlanError,
)
from nestforge.exporters.source import ModelSource
from nestforge.exporters.universal import load_universal
from nestforge.profiles.compile_request import CompileRequest
from nestforge.profiles.precision import Precision, run_by
from nestforge.runtime.engines.latencies import measuring_host
from nestforge.runtime.engines.measure import measure_bundle
from nestforge.runtime.engines.runner import runner_for
from nestforge.runtime.inputs.arrays import random_feeds
from nestforge.runtime.load import load
from support.cost_eff_models import save_tiny
from support.tiny_compile import board, builder_in, template_of, write_levels
from support.tiny_models import save_gpt2

pytest.importorskip("openvino")

from nestforge.runtime.engines import openvino as module

Reference = Callable[..., dict[str, Any]]


def for_openvino(path: Path) -> Bundle:
    bundle = open_bundle(path)
    engines = tuple(replace(engine, backend="openvino") for engine in bundle.manifest.engines)
    return replace(bundle, manifest=replace(bundle.manifest, engines=engines))


def test_later_runs_do_not_write_the_arrays_of_a_bound_one(tiny_bundle: Path) -> None:
    bundle = for_openvino(tiny_bundle)
    engine = bundle.manifest.engines[0]
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    hidden, total = np.empty((1, 8, 16), np.float32), np.empty((1, 16), np.float32)
    with runner_for(bundle, engine, "packed", 1) as runner:
        runner.bind(feeds, {"hidden": hidden, "total": total})()
        before = total.copy()
        runner.bind(random_feeds(bundle.manifest.inputs, engine.bucket, 1), {"hidden": np.empty_like(hidden)})()
        np.testing.assert_array_equal(total, before)


def test_another_engine_than_the_manifests_is_refused(tiny_bundle: Path) -> None:
    bundle = for_openvino(tiny_bundle)
    first, second, *_ = bundle.manifest.engines
    with pytest.raises(BundleCorruptError, match=r"inputs are .*, the manifest says"):
        runner_for(bundle, replace(first, file=second.file), "packed", 1).__enter__()


def test_a_host_that_cannot_run_an_engine_says_so(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = for_openvino(tiny_bundle)
    engine = bundle.manifest.engines[0]
    with pytest.raises(InputError, match="affinity: expected none, since engine ffn16@b1-s8 runs in OpenVINO"):
        runner_for(bundle, engine, "packed", 2, affinity=(0,))

    class Core:
        def get_property(self, *_: str) -> list[str]:
            return ["FP32"]

    monkeypatch.setattr(module, "_core", Core)
    assert module.problem(["fp32"]) is None
    with pytest.raises(BundleIncompatibleError, match="ffn16@b1-s8: this processor does not compute in bf16"):
        runner_for(bundle, replace(engine, precision="bf16"), "packed", 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert module.problem() == "openvino is not installed; install nestforge[openvino]"


def test_measurements_hold_for_this_release(tiny_bundle: Path) -> None:
    bundle = for_openvino(tiny_bundle)
    assert str(measuring_host(bundle)).endswith(module.described())
    bundle = replace(bundle, manifest=replace(bundle.manifest, engines=bundle.manifest.engines[:1]))
    (measured,) = measure_bundle(bundle, lambda *_: None, threads=1, force=True).measurement.engines
    assert (measured.engine, measured.residency) == ("ffn16@b1-s8", "packed")


PROGRAM = """
import sys
def watch(event, args):
    if event in ("socket.connect", "socket.getaddrinfo") or (event == "open" and set("wax+") & set(args[1] or "r")):
        print("not allowed:", event, args[:2], flush=True)
sys.addaudithook(watch)
from nestforge.bundle.open_bundle import open_bundle
from nestforge.runtime.engines.openvino import OpenVinoRunner
from nestforge.runtime.inputs.arrays import random_feeds
bundle = open_bundle(sys.argv[1])
engine = bundle.manifest.engines[0]
with OpenVinoRunner(bundle, engine, 1) as runner:
    print(len(runner.run(random_feeds(bundle.manifest.inputs, engine.bucket))))
"""


def test_nothing_is_looked_up_or_written(tiny_bundle: Path, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", PROGRAM, str(tiny_bundle)]
    done = subprocess.run(command, env=home, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout, list(tmp_path.iterdir())) == ("2\n", [])


@pytest.mark.parametrize("precision", run_by("openvino"))
def test_the_gate_runs_in_openvino_and_the_bundle_answers(
    source: ModelSource,
    tmp_path: Path,
    precision: Precision,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if said := module.problem([precision]):
        pytest.skip(said)
    universal = load_universal(replace(source, precisions=(precision,)))
    profile = board(backend="openvino", precision=precision, budgets={"full": {}})
    builder = builder_in(tmp_path / "bundle", universal, template_of(universal), profile)
    with load(write_levels(builder)) as model:
        engines = model.bundle.manifest.engines
        assert {(engine.backend, engine.precision) for engine in engines} == {("openvino", precision)}
        assert all(engine.parity is not None and engine.parity.outputs for engine in engines)
        feeds = random_feeds(model.bundle.manifest.inputs, engines[0].bucket)
        assert np.isfinite(model(feeds).outputs["last_hidden_state"]).all()
    run = module.OpenVinoRunner._run

    def wrong(self: Any, layout: Any, feeds: Any, outputs: Any) -> None:
        run(self, layout, feeds, outputs)
        for array in outputs.values():
            array *= -1

    request.getfixturevalue("blatant")
    monkeypatch.setattr(module.OpenVinoRunner, "_run", wrong)
    again = builder_in(tmp_path / "again", universal, template_of(universal), builder.profile)
    with pytest.raises(ParityError):
        again.build(universal.spec.universal(), builder.profile.buckets[0])


def test_precisions_that_it_does_not_run_are_refused_before_the_work(tiny_folder: Path, tmp_path: Path) -> None:
    def refused(**asked: Any) -> str:
        with pytest.raises(PlanError) as error:
            resolve(CompileRequest(tiny_folder, backend="openvino", profile="t4", buckets=["1x16"], **asked))
        return str(error.value)

    profile = resolve(CompileRequest(tiny_folder, backend="openvino", profile="t4", buckets=["1x16"])).profile
    assert (profile.backend, profile.tensorrt, profile.capacities) == ("openvino", None, None)
    assert refused(precisions=["int8"]) == (
        f"precision: int8 does not run on openvino; expected some of {', '.join(run_by('openvino'))}"
    )


def test_engines_that_are_not_whole_are_refused_before_the_work(tmp_path: Path) -> None:
    for folder, asked, message in (
        (save_gpt2(tmp_path / "gpt2"), {"generate": True}, "generate: engines for openvino are whole ones"),
        (save_tiny(tmp_path / "exits"), {}, "exits has exits, and engines for openvino are whole ones"),
    ):
        with pytest.raises(PlanError, match=message):
            resolve(CompileRequest(folder, backend="openvino", profile="t4", buckets=["1x16"], **asked))
