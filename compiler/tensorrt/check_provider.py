"""``nestforge verify --provider``: every engine on a GPU by ONNX Runtime against its graph on the processor.

The gate proved the graphs, by ONNX Runtime on a processor; its kernels for a GPU are others. They are compared as plans
of TensorRT are, within the limits of each receipt, texts of KV caches to their last place included. Without PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...bundle.device_files.plan_index import PlanParity
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.generation_entry import CACHED
from ...bundle.open_bundle import Bundle
from ...errors import BundleIncompatibleError, ParityError
from ...progress import Progress
from ...runtime.engines.onnxruntime_gpu.cached_runner import OnnxRuntimeGpuCacheRunner
from ...runtime.engines.onnxruntime_gpu.provider import Provider
from ...runtime.engines.runner import runnable_engines, runner_for
from ..graph.precision.proof_graphs import proof_bundle
from .check_plan import check_cached_plan, check_plan, check_prompt_plan


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
        for number, engine in enumerate(engines.values()):
            progress("engines", number, len(engines))
            try:
                found.append(CheckedEngine(engine.id, _checked(bundle, here, engine, provider)))
            except (ParityError, BundleIncompatibleError) as difference:  # the latter where it is compared to be opened
                found.append(CheckedEngine(engine.id, None, str(difference)))
    progress("engines", len(engines), len(engines))
    return tuple(found)


def _cached(bundle: Bundle, provider: Provider) -> tuple[EngineEntry, ...]:
    """Those that generate, where the provider has kernels for their caches."""
    entry = bundle.manifest.generation
    return entry.every_engine if entry is not None and provider.generates(entry) else ()


def _checked(bundle: Bundle, here: Bundle, engine: EngineEntry, provider: Provider) -> PlanParity:
    what = f"on provider {provider.name}"
    with runner_for(bundle, engine, "shared" if provider.shares else "packed", 1, provider) as runner:
        if not isinstance(runner, OnnxRuntimeGpuCacheRunner):
            return check_plan(here, engine, runner, what=what)
        check = check_cached_plan if engine.segment == CACHED else check_prompt_plan
        return check(here, engine, runner, runner.device, what)
