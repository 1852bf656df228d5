"""``python tests/gpu_memory.py BUNDLE ENGINE...``: bytes of the GPU's memory that these engines take together.

A process of its own, so that nothing else has loaded kernels or grown an arena. ``NESTFORGE_MEMORY_PATTERN=0`` opens
sessions without memory patterns, to see what those cost; ``NESTFORGE_THREADS`` is how many threads run each engine.
"""

import os
import sys
from contextlib import ExitStack
from threading import Thread

import onnxruntime
from nestforge.bundle.open_bundle import open_bundle
from nestforge.runtime.engines.onnxruntime_gpu.provider import provider_named
from nestforge.runtime.engines.runner import runner_for
from nestforge.runtime.inputs.arrays import random_feeds


def main(path: str, *names: str) -> None:
    bundle = open_bundle(path)
    provider = provider_named("cuda")
    if os.environ.get("NESTFORGE_MEMORY_PATTERN") == "0":
        onnxruntime.SessionOptions = _without_patterns
    device = provider.take()
    before = device.free_bytes()
    with ExitStack() as stack:
        for engine in bundle.manifest.engines:
            if engine.id in names:
                runner = stack.enter_context(runner_for(bundle, engine, "shared", 1, provider))
                feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
                for _ in range(int(os.environ.get("NESTFORGE_THREADS", "1"))):
                    thread = Thread(target=runner.run, args=(feeds,))
                    thread.start()
                    thread.join()
        print(before - device.free_bytes())
    device.release()


_Options = onnxruntime.SessionOptions


def _without_patterns() -> onnxruntime.SessionOptions:
    options = _Options()
    options.enable_mem_pattern = False
    return options


if __name__ == "__main__":
    main(*sys.argv[1:])
