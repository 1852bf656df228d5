"""Which engines of a bundle run where, and pools of runners."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleError, BundleIncompatibleError
from nestforge.profiles.backends import BACKENDS
from nestforge.profiles.precision import Precision
from nestforge.runtime.engines import onnxruntime
from nestforge.runtime.engines import runner as engine_runner
from nestforge.runtime.engines.runner import EnginePool, opener, runnable_engines
from support.fake_gpu import host_provider


def with_engines(bundle: Bundle, *engines: EngineEntry) -> Bundle:
    return replace(bundle, manifest=replace(bundle.manifest, engines=engines))


@pytest.mark.parametrize("precision", ["int8", "int8-dynamic", "int4"])
def test_a_provider_leaves_out_integers_that_only_the_processor_multiplies(
    bundle: Bundle, precision: Precision
) -> None:
    first, *others = bundle.manifest.engines
    some = with_engines(bundle, replace(first, precision=precision), *others)
    assert runnable_engines(some) == some.manifest.engines
    assert runnable_engines(some, host_provider()) == some.manifest.engines[1:]
    every = with_engines(bundle, *(replace(engine, precision=precision) for engine in bundle.manifest.engines))
    with pytest.raises(BundleIncompatibleError) as error:
        runnable_engines(every, host_provider())
    assert str(error.value) == (
        f"bundle {bundle.path}: provider host runs none of its engines, whose kernels for {precision} are a "
        "processor's; use provider cpu, or compile it with fp32 or fp16"
    )


def test_a_provider_runs_graphs_for_tensorrt_whatever_their_precision(bundle: Bundle) -> None:
    precisions: tuple[Precision, ...] = ("int8", "bf16", "fp16", "fp32")
    pairs = zip(bundle.manifest.engines, precisions, strict=False)
    graphs = with_engines(bundle, *(replace(one, backend="tensorrt", precision=name) for one, name in pairs))
    assert {engine.precision for engine in graphs.manifest.engines} >= {"int8", "bf16"}
    assert runnable_engines(graphs, host_provider()) == graphs.manifest.engines


@pytest.mark.parametrize("name", BACKENDS)
def test_every_back_end_has_an_opener(name: str) -> None:
    here = opener(name)
    for part in ("problem", "open_runner", "described"):
        assert inspect.signature(getattr(here, part)) == inspect.signature(getattr(onnxruntime, part)).replace(
            return_annotation=inspect.signature(getattr(here, part)).return_annotation
        )
    assert here.take_device is None or callable(here.take_device)


def test_this_host_has_onnx_runtime_and_another_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opener("onnxruntime").problem() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert opener("onnxruntime").problem() == "onnxruntime is not installed; install nestforge[cpu]"


def test_engines_of_one_file_are_opened_once(exits_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = engine_runner.runner_for

    def counting(bundle: Any, engine: Any, *rest: Any) -> Any:
        opened.append(engine.file)
        return real(bundle, engine, *rest)

    monkeypatch.setattr(engine_runner, "runner_for", counting)
    bundle = open_bundle(exits_bundle)
    pool = EnginePool(bundle, {engine.id: "shared" for engine in bundle.manifest.engines}, 1)
    by_file: dict[str, set[int]] = {}
    for engine in bundle.manifest.engines:
        by_file.setdefault(engine.file, set()).add(id(pool.get(engine)))
    assert sorted(opened) == sorted(by_file)
    assert all(len(runners) == 1 for runners in by_file.values())
    assert len(opened) < len(bundle.manifest.engines)
    pool.close()
    with pytest.raises(BundleError, match="the model is closed"):
        pool.get(bundle.manifest.engines[0])
