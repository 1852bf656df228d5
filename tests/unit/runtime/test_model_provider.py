"""A model on another provider than the processor's own: what it says, what it refuses, and whose figures it goes by."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.errors import BundleIncompatibleError, InputError, SelectionError
from nestforge.runtime import load as module
from nestforge.runtime.inputs.arrays import random_feeds
from nestforge.runtime.load import load
from support.exit_bundles import write_exits_bundle
from support.fake_gpu import HostDevice, host_provider

Feeds = Callable[..., dict[str, Any]]
Edit = Callable[[Path, Callable[[dict[str, Any]], object]], None]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    """``cuda`` is the processor as a provider."""
    found = HostDevice()
    monkeypatch.setattr(module, "provider_named", lambda name: None if name == "cpu" else host_provider(found))
    return found


def test_answers_say_where_they_ran_and_are_the_same(tiny_bundle: Path, device: HostDevice, feeds: Feeds) -> None:
    with load(tiny_bundle, provider="cuda", preload=True) as model, load(tiny_bundle) as plain:
        held = device.allocated_bytes
        for shape in ((1, 8), (1, 5), (2, 16)):
            mine, known = model(feeds(*shape)), plain(feeds(*shape))
            for name, array in known.outputs.items():
                np.testing.assert_allclose(mine[name], array, rtol=1e-5, atol=1e-5)
            assert mine.reason == "no limit given: the largest submodel; by ONNX Runtime's provider host"
            assert mine.residency == "shared"
            assert mine.padding == known.padding
        assert device.allocated_bytes == held > 0
    assert device.allocated_bytes == 0


def test_latencies_of_a_processor_are_told_as_such(tiny_bundle: Path, device: HostDevice, feeds: Feeds) -> None:
    with load(tiny_bundle, provider="cuda") as model, load(tiny_bundle) as plain:
        assert plain(feeds(1, 8), latency_ms=2).reason.startswith("measured here 0.4 ms")
        assert model(feeds(1, 8), latency_ms=2).reason.startswith("measured on ")


def test_engines_of_plans_run_as_graphs(
    own_bundle: Path, device: HostDevice, feeds: Feeds, edit_manifest: Edit
) -> None:
    def change(manifest: dict[str, Any]) -> None:
        for engine in manifest["engines"]:
            engine["backend"] = "tensorrt"

    edit_manifest(own_bundle, change)
    with pytest.raises(BundleIncompatibleError, match="tensorrt is not installed"):
        load(own_bundle)
    with load(own_bundle, provider="cuda") as model:
        answer = model(feeds(1, 8))
    assert (answer.residency, answer["hidden"].shape) == ("shared", (1, 8, 16))


@pytest.mark.parametrize("residency", ["packed", "mapped"])
def test_a_residency_that_the_provider_has_not_is_refused(
    tiny_bundle: Path, device: HostDevice, residency: Any
) -> None:
    with pytest.raises(InputError, match=rf"^residency '{residency}': with provider 'cuda' expected auto or shared$"):
        load(tiny_bundle, provider="cuda", residency=residency)


def test_threads_are_not_placed_for_a_provider(tiny_bundle: Path, device: HostDevice) -> None:
    with pytest.raises(InputError) as error:
        load(tiny_bundle, provider="cuda", affinity=[0])
    assert str(error.value) == "affinity: expected none with provider 'cuda', which computes on a GPU"


def test_a_cap_on_memory_holds(tiny_bundle: Path, device: HostDevice) -> None:
    with pytest.raises(SelectionError, match=r"^memory_mb=0\.0001: "):
        load(tiny_bundle, provider="cuda", memory_mb=0.0001)
    with load(tiny_bundle, provider="cuda", memory_mb=100) as model:
        assert set(model.residencies.values()) == {"shared"}


def test_segments_of_a_range_leave_the_answer_to_the_whole_engine(tmp_path: Path, device: HostDevice) -> None:
    bundle = write_exits_bundle(tmp_path / "b", [Bucket(4, 8, 1, 1)])
    with load(bundle, provider="cuda") as model, load(bundle) as plain:
        inputs = random_feeds(model.bundle.manifest.inputs, Bucket(3, 5))
        answer = model(inputs)
        assert answer.padding is None
        np.testing.assert_allclose(answer["logits"], plain(inputs, exits="off")["logits"], rtol=1e-5, atol=1e-5)
        assert "; whole engine: submodel depth4: its exits cannot be used here, engine " in answer.reason
        with pytest.raises(SelectionError, match=r"is left out \(by memory_mb, .*, or as a range on a GPU\)"):
            model(inputs, exits=0.5)


def test_a_host_without_the_provider_never_answers_on_the_processor(tiny_bundle: Path) -> None:
    with pytest.raises(BundleIncompatibleError, match=r"^provider cuda: onnxruntime .* and no CUDAExecutionProvider; "):
        load(tiny_bundle, provider="cuda")
    with pytest.raises(InputError, match="provider 'gpu': expected one of cpu, cuda, tensorrt"):
        load(tiny_bundle, provider="gpu")
