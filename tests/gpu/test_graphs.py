"""CUDA graphs of the CUDA provider under what a server does: many threads and chains."""

import threading

import numpy as np
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import Bundle
from nestforge.runtime.engines.onnxruntime_gpu.provider import Provider
from nestforge.runtime.exits.policy import ExitPolicy
from nestforge.runtime.inputs.arrays import random_feeds
from nestforge.runtime.load import load
from support.gpu_available import Results, on


def test_threads_get_their_own_answers(cuda: Provider, leaver: Bundle, results: Results) -> None:
    """Six threads, chains and whole engines, requests of both buckets."""
    asked = [{"exits": ExitPolicy((-1.0, -1.0), "<=")}, {"exits": ExitPolicy((1.0, 1.0), "<=")}, {"exits": "off"}]
    cases = [
        (random_feeds(leaver.manifest.inputs, bucket, seed), how)
        for seed, bucket in enumerate((Bucket(1, 64), Bucket(8, 64), Bucket(8, 64)))
        for how in asked
    ]
    with load(leaver.path) as known:
        wanted = [known(feeds, **how)["logits"] for feeds, how in cases]
    failures: list[BaseException] = []
    with on(cuda, leaver) as model:

        def work(start: int) -> None:
            try:
                for turn in range(2 * len(cases)):
                    number = (start + turn) % len(cases)
                    feeds, how = cases[number]
                    np.testing.assert_allclose(model(feeds, **how)["logits"], wanted[number], rtol=0, atol=1e-4)
            except BaseException as failure:  # noqa: BLE001  (handed to the test's own thread)
                failures.append(failure)

        threads = [threading.Thread(target=work, args=(start,)) for start in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures[0]
    results.add("six threads", "equal", "equal", "chains and engines, to the processor")
