"""A plan against the graph that it was built from: the second half of its proof.

The compile proved that the graph equals the PyTorch submodel, by running it in ONNX Runtime. Here, on the device and
without PyTorch, the plan must equal the graph in ONNX Runtime (of one in bfloat16 its emulation), within the same
limits. It is asked of the plan as it will run: opened from its file, its weights taken from the store.

A KV-cache plan is compared over whole texts. Both get the texts of the gate in the same pieces, each with a
cache of its own, the plan's on the GPU as it will be. Its logits behind every token, and what its cache holds in the
end, must be the graph's. One more text fills the cache to its last place, where that is affordable. Behind an encoder
both read what its graph makes of the same prompts; that of the encoder's plan stays on the GPU, and is copied back.

``nestforge verify --provider`` compares alike: every engine on a GPU by ONNX Runtime, whose kernels there are others,
against its graph on the processor, texts of KV caches to their last place included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import util
from math import isqrt
from typing import Protocol

import numpy as np

from ...bucket import Bucket
from ...bundle.device_files.plan_index import PlanParity
from ...bundle.entries.engine_entry import EngineEntry, ParityOutput
from ...bundle.entries.generation_entry import CACHED, PROMPT_TOKENS, GenerationEntry
from ...bundle.entries.tensor_spec import TensorSpec
from ...bundle.open_bundle import Bundle
from ...bundle.roles import has_decoder
from ...errors import BuildError, BundleIncompatibleError, ParityError
from ...profiles.precision import PRECISIONS
from ...progress import Progress, counted
from ...runtime.device.device import Device
from ...runtime.device.threads import threads_or_default
from ...runtime.engines.onnxruntime_gpu.provider import Provider
from ...runtime.engines.residency import Residency
from ...runtime.engines.runner import Runner, runnable_engines, runner_for
from ...runtime.generation.cache_memory import prompt_read
from ...runtime.graphs.task_tensors import TaskTensors
from ...runtime.inputs.arrays import Array, random_feeds
from ..graph.precision.proof_graphs import proof_bundle
from ..parity.cached_cases import (
    Batch,
    Row,
    behind,
    cached_batches,
    cases_of,
    judged_specs,
    random_prompt,
    read_prompts,
    run_batches,
)
from ..parity.cases import Case, shapes_to_prove, unjudged
from ..parity.compare import Rounding, Roundings, Tolerance
from ..parity.judge import JudgedOutputs, Replayed, judge

# How what is checked is named.
PLAN = "its plan"
# Cases of a static bucket; a range has one at each of several shapes.
_CASES_COMPARED = 4
# Near ties that may be met while looking for those cases.
_MAX_NEAR_TIES = 4
# Plan and graph round the same activations by the same scales; what lies between two integers may fall to either, and
# what follows it then differs a little: cosines above 0.99 between two ways to compute all-MiniLM-L6-v2. Single
# elements are off by several times what is usual, so that the angle is the limit that counts.
_INTEGER_TOLERANCE = Tolerance(atol=2.0, rtol=0.1, min_cosine=0.98, rms=0.6)
# Numbers that the scores of a layer may have for the longest prompt: 400 MB of float32 in the graph, and in the plan.
_MOST_SCORES = 100_000_000
# Numbers that the logits of a text which fills the cache may have: 400 MB of float32 in the graph, and in the plan.
_MOST_LOGITS = 100_000_000
# The last tokens of that text come one by one.
_STEPS_AT_THE_END = 2


class Answers(Protocol):
    """A plan that is asked."""

    def run(self, feeds: Mapping[str, Array], routing: bool = False) -> list[Array]:
        """See ``Runner.run``."""
        ...


def check_plan(
    here: Bundle,
    engine: EngineEntry,
    plan: Answers,
    shapes: Sequence[Bucket] | None = None,
    what: str = PLAN,
    task: TaskTensors | None = None,
    residency: Residency = "shared",
) -> PlanParity:
    """How the open ``plan`` of ``engine`` compares with its graph in the bundle as this host runs it, ``here``, with
    the tensors of ``task`` or the base's, at these ``shapes``, or at some all over its bucket.

    A decision between equals may fall otherwise in each, and the outputs behind it then differ rightly: such a case is
    left out, and another one takes its place. ``what`` is named where it differs. Raises ParityError if a case breaks
    the rule of the graph's own receipt, or too many are left out; BuildError where ONNX Runtime is missing.
    """
    compared_with = graph_in_onnx_runtime(engine)
    from ...runtime.engines.onnxruntime.runner import OnnxRuntimeRunner

    limit, rounding = plan_limits(engine)
    inputs, outputs = here.manifest.interface_of(engine)
    mask = next((spec.name for spec in inputs if _is_mask(spec)), None)
    own = next(graph for graph in here.manifest.every_engine if graph.id == engine.id)
    computed = here.manifest.exits.computed_from if here.manifest.exits else ()
    judged = JudgedOutputs(outputs, computed, mask, has_decoder(here.manifest))
    names, routing = [spec.name for spec in outputs], [entry.name for entry in engine.routing or ()]
    kept: list[ParityOutput] = []
    left_out = 0
    shapes = shapes or shapes_of(engine.bucket)
    with OnnxRuntimeRunner(here, own, residency, threads_or_default(None)) as opened:
        graph: Answers = opened if task is None else opened.for_task(task)
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
                raise ParityError(f"engine {engine.id}: {what}: {broken.describe()}; allowed {limit.rule}")
            else:
                left_out += 1
            if len(kept) == len(shapes) * len(names):
                break
        else:
            raise ParityError(
                f"engine {engine.id}: {what} decides otherwise than its graph in {left_out} of "
                f"{len(shapes) + _MAX_NEAR_TIES} cases, more than equal scores explain"
            )
    return _parity(compared_with, limit.rule, len(shapes), kept, left_out)


def check_prompt_plan(here: Bundle, engine: EngineEntry, plan: Runner, device: Device, what: str = PLAN) -> PlanParity:
    """As ``check_plan``, for the open ``plan`` of an encoder's ``engine`` on ``device``, by prompts up to the longest
    that it takes, or that is affordable."""
    generation = here.manifest.generation
    assert generation is not None
    entry = generation.of(engine)
    heads = max(layer.heads for layer in entry.source_layers)
    longest = min(engine.bucket.sequence, isqrt(_MOST_SCORES // heads))
    return check_plan(
        here, engine, _ReadBack(plan, engine, entry, device), shapes_of(Bucket(1, longest, None, 1)), what
    )


def check_cached_plan(here: Bundle, engine: EngineEntry, plan: Runner, device: Device, what: str = PLAN) -> PlanParity:
    """How the open ``plan`` of ``engine``, whose cache lies on ``device``, compares with its graph in the bundle as
    this host runs it, ``here``.

    Raises ParityError if a text breaks the rule of the graph's own receipt; BuildError where ONNX Runtime is missing.
    """
    compared_with = graph_in_onnx_runtime(engine)
    from ...runtime.engines.onnxruntime.runner import OnnxRuntimeRunner

    generation = here.manifest.generation
    assert generation is not None
    entry = generation.of(engine)
    batches = _texts(entry, engine)
    limit, rounding = plan_limits(engine)
    own = next(graph for graph in generation.engines if graph.id == engine.id)
    kept: list[ParityOutput] = []
    threads = threads_or_default(None)
    encoder, read = generation.encoder_of(engine), None
    if encoder is not None:
        with OnnxRuntimeRunner(here, encoder, "shared", threads) as reader:
            read = read_prompts(reader, entry, batches)
    with OnnxRuntimeRunner(here, own, "shared", threads) as graph:
        for batch in batches:
            expected = run_batches(graph, own, entry, [batch], read)
            found = run_batches(plan, engine, entry, [batch], read, device)
            reference = Replayed(expected, [rounding] * len(batch))
            outputs = JudgedOutputs(judged_specs(entry))
            verdict = judge(reference, found, cases_of([batch]), outputs, limit)
            if verdict.broken is not None:
                raise ParityError(f"engine {engine.id}: {what}: {verdict.broken.describe()}; allowed {limit.rule}")
            kept += verdict.outputs
    note = unjudged(cases_of(batches), judged_specs(entry))
    rule = limit.rule if note is None else f"{limit.rule}; {note}"
    return _parity(compared_with, rule, len(cases_of(batches)), kept)


def _parity(reference: str, rule: str, cases: int, outputs: Sequence[ParityOutput], left_out: int = 0) -> PlanParity:
    """The worst of all ``outputs``."""
    largest, least = max(output.max_abs for output in outputs), min(output.min_cosine for output in outputs)
    return PlanParity(reference, rule, cases, largest, least, left_out)


def _texts(entry: GenerationEntry, engine: EngineEntry) -> list[Batch]:
    """Those of the gate that fit, the longest run among them, and one that fills the cache."""
    assert engine.capacity is not None
    within = replace(entry, positions=min(entry.positions, engine.capacity))
    batches = cached_batches(within, long=True)
    tokens = within.positions
    if tokens * entry.vocabulary <= _MOST_LOGITS:
        rng = np.random.default_rng(tokens)
        ids, steps = rng.integers(0, entry.vocabulary, (1, tokens)), min(_STEPS_AT_THE_END, tokens - 1)
        row = Row(Case("to the last place", {"input_ids": ids}), (tokens - steps, *[1] * steps))
        if entry.encoder is not None:
            row = behind(entry, row, random_prompt(entry, rng, PROMPT_TOKENS))
        batches.append((row,))
    return batches


def graph_in_onnx_runtime(engine: EngineEntry) -> str:
    """Reference of a plan of ``engine``. Raises BuildError where ONNX Runtime is missing."""
    if util.find_spec("onnxruntime") is None:
        raise BuildError(f"engine {engine.id}: a plan is checked against ONNX Runtime here; install onnxruntime")
    import onnxruntime

    return f"the graph in ONNX Runtime {onnxruntime.__version__}"


def plan_limits(engine: EngineEntry) -> tuple[Tolerance, Roundings]:
    """The rule of the graph's own receipt, and PyTorch's own rounding by output: it is not here to be measured on the
    inputs of a plan, so that the receipt's figures, at most 1 % of an output, serve for it."""
    assert engine.parity is not None, "a manifest has no engine without a receipt"
    receipt = engine.parity
    limit = Tolerance(receipt.atol, receipt.rtol, receipt.min_cosine, receipt.rms)
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


@dataclass(frozen=True)
class _ReadBack:
    """An encoder's plan, its answers as arrays of the host."""

    plan: Runner
    engine: EngineEntry
    entry: GenerationEntry
    device: Device

    def run(self, feeds: Mapping[str, Array], routing: bool = False) -> list[Array]:
        """See ``Runner.run``."""
        routes = {one.name: np.empty(one.shape, np.int64) for one in (self.engine.routing or ()) if routing}
        device = self.device
        with device.lock, prompt_read(device, self.plan, self.entry, feeds["input_ids"][0], routes) as made:
            found = [np.empty(array.shape, np.float32) for array in made]
            for array, there in zip(found, made, strict=True):
                device.to_host(array, there.address)
            device.wait()
        return [*found, *routes.values()]


@dataclass(frozen=True)
class CheckedEngine:
    """One engine on a provider; ``problem`` says where it differs, else ``parity`` how close it is."""

    engine: str
    parity: PlanParity | None
    problem: str | None = None


def check_on_provider(bundle: Bundle, provider: Provider, progress: Progress) -> tuple[CheckedEngine, ...]:
    """The engines of ``bundle`` that run on ``provider``, one for each file. Raises a BundleError where none
    does."""
    engines = {engine.file: engine for engine in (*runnable_engines(bundle, provider), *_cached(bundle, provider))}
    found = []
    with proof_bundle(bundle) as here:
        for engine in counted(progress, "engines", engines.values()):
            try:
                found.append(CheckedEngine(engine.id, _checked(bundle, here, engine, provider)))
            except (ParityError, BundleIncompatibleError) as difference:  # the latter where it is compared to be opened
                found.append(CheckedEngine(engine.id, None, str(difference)))
    return tuple(found)


def _cached(bundle: Bundle, provider: Provider) -> tuple[EngineEntry, ...]:
    """Those that generate, where the provider has kernels for their caches."""
    entry = bundle.manifest.generation
    return entry.every_engine if entry is not None and provider.generates(entry) else ()


def _checked(bundle: Bundle, here: Bundle, engine: EngineEntry, provider: Provider) -> PlanParity:
    from ...runtime.engines.onnxruntime_gpu.cached_runner import OnnxRuntimeGpuCacheRunner  # needs onnxruntime

    what = f"on provider {provider.name}"
    with runner_for(bundle, engine, "shared" if provider.shares else "packed", 1, provider) as runner:
        if not isinstance(runner, OnnxRuntimeGpuCacheRunner):
            return check_plan(here, engine, runner, what=what)
        check = check_cached_plan if engine.segment == CACHED else check_prompt_plan
        return check(here, engine, runner, runner.device, what)
