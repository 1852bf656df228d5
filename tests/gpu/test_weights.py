"""Whether sessions on the CUDA provider read the one copy of the weights, or made copies without saying so."""

import numpy as np
import pytest
from nestforge.bundle.open_bundle import Bundle
from nestforge.runtime.engines.onnxruntime_gpu.provider import Provider
from nestforge.runtime.engines.onnxruntime_gpu.runner import OnnxRuntimeGpuRunner
from nestforge.runtime.inputs.arrays import random_feeds
from support.gpu_available import Results


@pytest.mark.parametrize("which", ["first", "last"])
def test_zeros_over_the_store_change_what_engines_answer(
    cuda: Provider, leaver: Bundle, results: Results, which: str
) -> None:
    """Where a value lies elsewhere than ONNX Runtime wants it, it warns, where nobody listens, and loads its own."""
    engine = leaver.manifest.engines[0 if which == "first" else -1]
    feeds = random_feeds(leaver.manifest.interface_of(engine)[0], engine.bucket)
    with OnnxRuntimeGpuRunner(leaver, engine, cuda) as runner:
        before = runner.run(feeds)
        device, spans = runner.device, runner._open_engine.store.store._addresses
        with device.lock:
            kept = {address: np.empty(end - begin, np.uint8) for (begin, end), address in spans.items()}
            for address, values in kept.items():
                device.to_host(values, address)
            device.wait()
            for address, values in kept.items():
                device.to_device(address, np.zeros_like(values))
            device.wait()
        during = runner.run(feeds)
        with device.lock:  # other engines read it too
            for address, values in kept.items():
                device.to_device(address, values)
            device.wait()
        after = runner.run(feeds)
    assert not any(np.array_equal(a, b) for a, b in zip(before, during, strict=True))
    for found, known in zip(after, before, strict=True):
        np.testing.assert_array_equal(found, known)
    results.add(f"zeros over the store, {engine.id}", "other answers", "other answers", "sessions read the one copy")
