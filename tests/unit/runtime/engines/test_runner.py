"""Which engines of a bundle run where."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BundleIncompatibleError
from nestforge.profiles.backends import BACKENDS
from nestforge.runtime.engines.onnxruntime import backend as onnxruntime
from nestforge.runtime.engines.runner import opener, runnable_engines
from support.fake_gpu import host_provider

Edit = Callable[[Path, Callable[[dict[str, Any]], object]], None]


@pytest.mark.parametrize("precision", ["int8", "int8-dynamic", "int4"])
def test_a_provider_leaves_out_integers_that_only_the_processor_multiplies(
    own_bundle: Path, edit_manifest: Edit, precision: str
) -> None:
    def some(manifest: dict[str, Any]) -> None:
        manifest["engines"][0]["precision"] = precision

    def every(manifest: dict[str, Any]) -> None:
        for engine in manifest["engines"]:
            engine["precision"] = precision

    edit_manifest(own_bundle, some)
    bundle = open_bundle(own_bundle)
    assert runnable_engines(bundle) == bundle.manifest.engines
    assert runnable_engines(bundle, host_provider()) == bundle.manifest.engines[1:]
    edit_manifest(own_bundle, every)
    with pytest.raises(BundleIncompatibleError) as error:
        runnable_engines(open_bundle(own_bundle), host_provider())
    assert str(error.value) == (
        f"bundle {own_bundle}: provider host runs none of its engines, whose kernels for {precision} are a "
        "processor's; use provider cpu, or compile it with fp32 or fp16"
    )


def test_a_provider_runs_graphs_for_tensorrt_whatever_their_precision(own_bundle: Path, edit_manifest: Edit) -> None:
    def change(manifest: dict[str, Any]) -> None:
        for engine, precision in zip(manifest["engines"], ("int8", "bf16", "fp16", "fp32"), strict=False):
            engine.update(backend="tensorrt", precision=precision)

    edit_manifest(own_bundle, change)
    bundle = open_bundle(own_bundle)
    assert {engine.precision for engine in bundle.manifest.engines} >= {"int8", "bf16"}
    assert runnable_engines(bundle, host_provider()) == bundle.manifest.engines


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
