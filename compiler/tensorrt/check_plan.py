"""A plan against the graph that it was built from: the second half of its proof.

The compile proved that the graph equals the PyTorch submodel, by running it in ONNX Runtime. Here, on the device and
without PyTorch, the plan must equal the graph in ONNX Runtime (of one in bfloat16 its emulation), within the same
limits. It is asked of the plan as it will run: opened from its file, its weights taken from the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import util
from typing import Protocol

import numpy as np

from ...bucket import Bucket
from ...bundle.device_files.plan_index import PlanParity
from ...bundle.entries.engine_entry import EngineEntry, ParityOutput
from ...bundle.entries.tensor_spec import TensorSpec
from ...bundle.open_bundle import Bundle
from ...errors import BuildError, ParityError
from ...profiles.precision import PRECISIONS
from ...runtime.engines.contract.threads import threads_or_default
from ...runtime.inputs.arrays import Array
from ...runtime.inputs.feeds import random_feeds
from ..parity.evidence.cases import Case, shapes_to_prove
from ..parity.evidence.compare import Tolerance
from ..parity.evidence.replayed import Replayed
from ..parity.evidence.rounding import Rounding, Roundings
from ..parity.judge import JudgedOutputs, judge

# Of a static bucket; of a range there is one at each of several shapes.
_CASES_COMPARED = 4
# Plan and graph round the same activations by the same scales; what lies between two integers may fall to either, and
# what follows it then differs a little: cosines above 0.99 between two ways to compute all-MiniLM-L6-v2. Single
# elements are off by several times what is usual, so that the angle is the limit that counts.
_INTEGER_TOLERANCE = Tolerance(atol=2.0, rtol=0.1, min_cosine=0.98, rms=0.6)
# Near ties that may be met while looking for those cases.
_MAX_NEAR_TIES = 4


class Answers(Protocol):
    """A plan that is asked."""

    def run(self, feeds: Mapping[str, Array], routing: bool = False) -> list[Array]:
        """See ``Runner.run``."""
        ...


def check_plan(here: Bundle, engine: EngineEntry, plan: Answers, shapes: Sequence[Bucket] | None = None) -> PlanParity:
    """How the open ``plan`` of ``engine`` compares with its graph in the bundle as this host runs it, ``here``, at
    these ``shapes``, or at some all over its bucket.

    A decision between equals may fall otherwise in each, and the outputs behind it then differ rightly: such a case is
    left out, and another one takes its place. Raises ParityError if a case breaks the rule of the graph's own receipt,
    or too many are left out; BuildError where ONNX Runtime is missing.
    """
    compared_with = graph_in_onnx_runtime(engine)
    from ...runtime.engines.onnxruntime.runner import OnnxRuntimeRunner

    limit, rounding = plan_limits(engine)
    inputs, outputs = here.manifest.interface_of(engine)
    mask = next((spec.name for spec in inputs if _is_mask(spec)), None)
    own = next(graph for graph in here.manifest.every_engine if graph.id == engine.id)
    judged = JudgedOutputs(outputs, here.manifest.exits.computed_from if here.manifest.exits else (), mask)
    names, routing = [spec.name for spec in outputs], [entry.name for entry in engine.routing or ()]
    kept: list[ParityOutput] = []
    left_out = 0
    shapes = shapes or shapes_of(engine.bucket)
    with OnnxRuntimeRunner(here, own, "shared", threads_or_default(None)) as graph:
        for seed in range(len(shapes) + _MAX_NEAR_TIES):
            feeds = case_feeds(inputs, shapes[seed - left_out], seed)
            expected, found = (
                dict(zip([*names, *routing], runner.run(feeds, routing=True), strict=True)) for runner in (graph, plan)
            )
            reference = Replayed([{name: expected[name] for name in names}], [rounding])
            case = Case(f"seed {seed} at {shapes[seed - left_out]}", feeds)
            verdict = judge(reference, [found], [case], judged, limit)
            broken = verdict.broken
            if broken is None:
                kept += verdict.outputs
            elif all(np.array_equal(expected[name], found[name]) for name in routing):
                raise ParityError(f"engine {engine.id}: its plan: {broken.describe()}; allowed {limit.rule}")
            else:
                left_out += 1
            if len(kept) == len(shapes) * len(names):
                break
        else:
            raise ParityError(
                f"engine {engine.id}: its plan decides otherwise than its graph in {left_out} of "
                f"{len(shapes) + _MAX_NEAR_TIES} cases, more than equal scores explain"
            )
    return PlanParity(
        reference=compared_with,
        rule=limit.rule,
        cases=len(shapes),
        max_abs=max(output.max_abs for output in kept),
        min_cosine=min(output.min_cosine for output in kept),
        left_out=left_out,
    )


def graph_in_onnx_runtime(engine: EngineEntry) -> str:
    """What a plan of ``engine`` is compared with. Raises BuildError where ONNX Runtime is missing."""
    if util.find_spec("onnxruntime") is None:
        raise BuildError(f"engine {engine.id}: a plan is checked against ONNX Runtime here; install onnxruntime")
    import onnxruntime

    return f"the graph in ONNX Runtime {onnxruntime.__version__}"


def plan_limits(engine: EngineEntry) -> tuple[Tolerance, Roundings]:
    """The rule of the graph's own receipt, and PyTorch's own rounding by output: it is not here to be measured on the
    inputs of a plan, so that the receipt's figures, at most 1 % of an output, serve for it."""
    assert engine.parity is not None, "a manifest has no engine without a receipt"
    receipt = engine.parity
    limit = Tolerance(receipt.atol, receipt.rtol, receipt.min_cosine, receipt.rms or receipt.atol + receipt.rtol)
    rounding = {output.name: Rounding(output.float32_max_abs, output.float32_rms) for output in receipt.outputs}
    return _INTEGER_TOLERANCE if PRECISIONS[engine.precision].is_integer else limit, rounding


def shapes_of(bucket: Bucket) -> list[Bucket]:
    """The shapes of the cases: the largest, since it takes the most memory, and others all over a range."""
    if bucket.is_static:
        return [bucket] * _CASES_COMPARED
    return list(dict.fromkeys([bucket.largest, *shapes_to_prove(bucket)]))


def case_feeds(inputs: Sequence[TensorSpec], bucket: Bucket, seed: int) -> dict[str, Array]:
    """Random values; masks over the sequence attend to a prefix of each row, to all of it for seed 0."""
    feeds = random_feeds(inputs, bucket, seed)
    for spec in inputs:
        if _is_mask(spec):
            longest = np.random.default_rng(seed).integers(1, bucket.sequence + 1, bucket.batch)
            lengths = longest if seed else np.full(bucket.batch, bucket.sequence)
            feeds[spec.name][...] = np.arange(bucket.sequence) < lengths[:, None]
    return feeds


def _is_mask(spec: TensorSpec) -> bool:
    return spec.high == 2 and spec.dims == ("batch", "sequence")
