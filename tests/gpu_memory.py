"""``python tests/gpu_memory.py BUNDLE ENGINE...``: bytes of the GPU's memory that these engines take together.

A process of its own, so that nothing else has loaded kernels or grown an arena.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

from nestforge.runtime.bundle import open_bundle
from nestforge.runtime.feeds import random_feeds
from nestforge.runtime.onnxruntime_gpu_provider import provider_named
from nestforge.runtime.runner import runner_for


def main(path: str, *names: str) -> None:
    bundle = open_bundle(path)
    provider = provider_named("cuda")
    assert provider is not None
    device = provider.take()
    before = device.free_bytes()
    with ExitStack() as stack:
        for engine in bundle.manifest.engines:
            if engine.id in names:
                runner = stack.enter_context(runner_for(bundle, engine, "shared", 1, provider))
                runner.run(random_feeds(bundle.manifest.inputs, engine.bucket))
        print(before - device.free_bytes())
    device.release()


if __name__ == "__main__":
    main(*sys.argv[1:])
