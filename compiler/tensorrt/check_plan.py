"""A plan against the graph that it was built from: the second half of its proof.

The compile proved that the graph equals the PyTorch submodel, by running it in ONNX Runtime. Here, on the device and
without PyTorch, the plan must equal the graph in ONNX Runtime, within the same limits. It is asked of the plan as it
will run: opened from its file, its weights taken from the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import util

import numpy as np

from ...elastic import Bucket
from ...errors import BuildError, ParityError
from ...runtime.arrays import Array
from ...runtime.bundle import Bundle
from ...runtime.feeds import random_feeds
from ...runtime.manifest import EngineEntry, TensorSpec
from ...runtime.plan_index import PlanParity
from ...runtime.runner import Runner
from ...runtime.threads import threads_or_default
from ..parity import Arrays, Tolerance, compare

_SEEDS = (0, 1, 2, 3)


def check_plan(bundle: Bundle, engine: EngineEntry, plan: Runner) -> PlanParity:
    """How the open ``plan`` of ``engine`` compares with its graph.

    Raises ParityError if it breaks the rule of the graph's own receipt, BuildError where ONNX Runtime is missing.
    """
    if util.find_spec("onnxruntime") is None:
        raise BuildError(f"engine {engine.id}: a plan is checked against ONNX Runtime here; install onnxruntime")
    import onnxruntime

    from ...runtime.onnxruntime_runner import OnnxRuntimeRunner

    assert engine.parity is not None, "a manifest has no engine without a receipt"
    limit = Tolerance(engine.parity.atol, engine.parity.rtol, engine.parity.min_cosine)
    inputs, outputs = bundle.manifest.interface(engine.segment)
    cases = {f"seed {seed}": case_feeds(inputs, engine.bucket, seed) for seed in _SEEDS}
    with OnnxRuntimeRunner(bundle, engine, "shared", threads_or_default(None)) as graph:
        expected = _answers(graph, outputs, list(cases.values()))
    found = _answers(plan, outputs, list(cases.values()))
    computed_from = bundle.manifest.exits.computed_from if bundle.manifest.exits else {}
    comparisons = compare(expected, found, list(cases), limit, computed_from)
    broken = next((comparison for comparison in comparisons if not comparison), None)
    if broken is not None:
        raise ParityError(f"engine {engine.id}: its plan: {broken.describe()}; allowed {limit.rule}")
    return PlanParity(
        reference=f"the graph in ONNX Runtime {onnxruntime.__version__}",
        rule=limit.rule,
        cases=len(cases),
        max_abs=max(comparison.output.max_abs for comparison in comparisons),
        min_cosine=min(comparison.output.min_cosine for comparison in comparisons),
    )


def case_feeds(inputs: Sequence[TensorSpec], bucket: Bucket, seed: int) -> dict[str, Array]:
    """Random values; masks over the sequence attend to a prefix of each row, to all of it for seed 0."""
    feeds = random_feeds(inputs, bucket, seed)
    for spec in inputs:
        if spec.high == 2 and spec.dims == ("batch", "sequence"):
            longest = np.random.default_rng(seed).integers(1, bucket.sequence + 1, bucket.batch)
            lengths = longest if seed else np.full(bucket.batch, bucket.sequence)
            feeds[spec.name][...] = np.arange(bucket.sequence) < lengths[:, None]
    return feeds


def _answers(runner: Runner, outputs: Sequence[TensorSpec], cases: Sequence[dict[str, Array]]) -> list[Arrays]:
    names = [spec.name for spec in outputs]
    return [dict(zip(names, runner.run(feeds), strict=True)) for feeds in cases]
