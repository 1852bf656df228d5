"""A plan that keeps a cache against the graph that it was built from, over whole texts: the second half of its proof.

Both get the texts of the gate in the same pieces, each with a cache of its own, the plan's on the GPU as it will be.
Its logits behind every token, and what its cache holds in the end, must be the graph's. One more text fills the cache
to its last place, where that is affordable. Behind an encoder both read what its graph makes of the same prompts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...bundle.device_files.plan_index import PlanParity
from ...bundle.entries.engine_entry import EngineEntry, ParityOutput
from ...bundle.entries.generation_entry import PROMPT_TOKENS, GenerationEntry
from ...bundle.open_bundle import Bundle
from ...errors import ParityError
from ...runtime.device.device import Device
from ...runtime.engines.contract.threads import threads_or_default
from ...runtime.engines.runner import Runner
from ..parity.evidence.cached_cases import Batch, Row, cached_batches, cases_of, judged_specs
from ..parity.evidence.cached_runs import read_prompts, run_batches
from ..parity.evidence.cases import Case
from ..parity.evidence.replayed import Replayed
from ..parity.judge import JudgedOutputs, judge
from .check_plan import graph_in_onnx_runtime, plan_limits

# Numbers that the logits of a text which fills the cache may have: 400 MB of float32 in the graph, and in the plan.
_MOST_LOGITS = 100_000_000
# The last tokens of that text come one by one.
_STEPS_AT_THE_END = 2


def check_cached_plan(here: Bundle, engine: EngineEntry, plan: Runner, device: Device) -> PlanParity:
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
                raise ParityError(f"engine {engine.id}: its plan: {verdict.broken.describe()}; allowed {limit.rule}")
            kept += verdict.outputs
    return PlanParity(
        reference=compared_with,
        rule=limit.rule,
        cases=len(cases_of(batches)),
        max_abs=max(output.max_abs for output in kept),
        min_cosine=min(output.min_cosine for output in kept),
    )


def _texts(entry: GenerationEntry, engine: EngineEntry) -> list[Batch]:
    """Those of the gate that fit, the longest run among them, and one that fills the cache."""
    assert engine.capacity is not None
    within = replace(entry, positions=min(entry.positions, engine.capacity))
    batches = cached_batches(within, long=True)
    tokens = within.positions
    if tokens * entry.vocabulary <= _MOST_LOGITS:
        rng = np.random.default_rng(tokens)
        feeds = {"input_ids": rng.integers(0, entry.vocabulary, (1, tokens))}
        if entry.encoder is not None:
            feeds["source_ids"] = rng.integers(0, entry.vocabulary, (1, min(PROMPT_TOKENS, entry.encoder.positions)))
        steps = min(_STEPS_AT_THE_END, tokens - 1)
        batches.append((Row(Case("to the last place", feeds), (tokens - steps, *[1] * steps)),))
    return batches
