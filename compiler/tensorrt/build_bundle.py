"""``nestforge build``: the plans of a bundle's TensorRT engines, built on the device that will run them.

Needs TensorRT, a GPU, ONNX Runtime to check against, and onnx; no torch and no checkpoint. The bundle stays as it is:
plans and their list are put beside its files.
"""

import hashlib
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from ...bundle.device_files.plan_index import (
    PLAN_SUFFIX,
    Gpu,
    PlanEntry,
    PlanParity,
    build_key,
    is_own,
    read_plan,
    read_plans,
    with_plan,
    write_plans,
)
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.generation_entry import CACHED, ENCODER
from ...bundle.manifest import MANIFEST_NAME, Manifest
from ...bundle.open_bundle import Bundle, open_bundle
from ...bundle.shape_profile import shape_profiles
from ...errors import BuildError, BundleCorruptError
from ...outside_file import parse_json
from ...profiles.backends import BACKENDS
from ...profiles.device_profile import TensorRTOptions
from ...progress import Progress, counted, silent
from ...runtime.engines.tensorrt import require_tensorrt
from ...strict import structure
from ...whole_file import alone, require_writable, write_whole
from ..graph.precision.proof_graphs import proof_bundle
from .graphs import require_supported

# Says that a plan is not checked yet; such an entry is never listed.
_UNCHECKED = PlanParity("none", "none", 1, float("inf"), -1.0)
_UNKNOWN_KIND = "unknown"


@dataclass(frozen=True)
class BuiltPlan:
    """One engine's plan; ``was_kept``: an earlier build had made it."""

    engine: str
    entry: PlanEntry
    was_kept: bool


def build_plans(path: str | Path, progress: Progress = silent) -> tuple[BuiltPlan, ...]:
    """Builds, checks and lists a plan for every TensorRT engine of the bundle in folder ``path``.

    A plan that is listed already, for this GPU and release and from the same inputs, is kept; so an interrupted build
    goes on where it was. Raises BundleError for a damaged bundle or a host without TensorRT, BuildError where a graph
    cannot be built, ParityError where a plan answers otherwise than its graph, OutputError.
    """
    bundle = open_bundle(path, check="full")
    engines = plan_engines(bundle)
    require_tensorrt(f"bundle {bundle.path}")
    from ...runtime.engines.tensorrt.engine import this_gpu

    gpu, options = this_gpu(), _profile_options(bundle.manifest)
    built: list[BuiltPlan] = []
    with proof_bundle(bundle) as here:
        for engine in counted(progress, "plans", engines):
            kept = _kept(bundle, engine, gpu, options)
            if kept is None:
                require_writable(bundle.path, "plans")
            entry = kept or _built(bundle, here, engine, gpu, options, progress)
            if kept is None:
                with alone(bundle.path):
                    write_plans(bundle, with_plan(read_plans(bundle), entry))
            built.append(BuiltPlan(engine.id, entry, kept is not None))
    return tuple(built)


def plan_engines(bundle: Bundle) -> tuple[EngineEntry, ...]:
    """The engines that need a plan, one for each graph; those that keep a cache, which need a later release, come last.
    Raises BuildError if there are none."""
    every = sorted(bundle.manifest.every_engine, key=lambda engine: engine.segment == CACHED)
    engines = {engine.file: engine for engine in every if not BACKENDS[engine.backend].runs_graphs}
    if not engines:
        raise BuildError(
            f"bundle {bundle.path}: has no engines for TensorRT; compile with a profile whose backend is tensorrt"
        )
    return tuple(engines.values())


def _profile_options(manifest: Manifest) -> TensorRTOptions:
    """TensorRT settings in the compile's profile, or the defaults. Raises BuildError."""
    data = manifest.provenance.profile.get("tensorrt") or {}
    return structure(TensorRTOptions, data, f"{MANIFEST_NAME}: provenance: profile: tensorrt", BuildError)


def _kept(bundle: Bundle, engine: EngineEntry, gpu: Gpu, options: TensorRTOptions) -> PlanEntry | None:
    """The plan that an earlier build on this host made of the same inputs, if its file is whole."""
    key = build_key(bundle, engine, gpu, options)
    for plan in read_plans(bundle):
        if (plan.graph, plan.key) == (engine.file, key) and is_own(plan):
            with suppress(BundleCorruptError):
                read_plan(bundle, plan)
                return plan
    return None


def _built(
    bundle: Bundle, here: Bundle, engine: EngineEntry, gpu: Gpu, options: TensorRTOptions, progress: Progress
) -> PlanEntry:
    from .build_plan import build_plan

    where, graph = f"engine {engine.id}", bundle.file(engine.file)
    require_supported(where, onnx.load(graph, load_external_data=False), gpu.tensorrt)
    inputs, _ = bundle.manifest.interface_of(engine)
    key = build_key(bundle, engine, gpu, options)
    began = time.perf_counter()
    profiles = shape_profiles(bundle.manifest, engine)
    data = build_plan(where, graph, inputs, profiles, options, gpu, progress)
    seconds = round(time.perf_counter() - began, 3)
    file = f"{engine.file.removesuffix('.onnx')}.{key[:12]}{PLAN_SUFFIX}"
    write_whole(bundle.path / file, lambda stream: stream.write(data), f"the plan of {where}")
    entry = PlanEntry(
        graph=engine.file,
        file=file,
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        key=key,
        gpu=gpu,
        options=options,
        activation_bytes=0,
        seconds=seconds,
        layers={},
        parity=_UNCHECKED,
    )
    try:
        return _checked(bundle, here, engine, entry)
    except BaseException:
        (bundle.path / file).unlink(missing_ok=True)  # a plan that is not listed would only be in the way
        raise


def _checked(bundle: Bundle, here: Bundle, engine: EngineEntry, entry: PlanEntry) -> PlanEntry:
    """``entry`` with what its plan is found to be, opened as it will run."""
    from ...runtime.engines.tensorrt.cached_runner import TensorRTCacheRunner
    from ...runtime.engines.tensorrt.runner import TensorRTRunner
    from .check_plan import check_cached_plan, check_plan, check_prompt_plan

    if engine.segment in (CACHED, ENCODER):
        check = check_cached_plan if engine.segment == CACHED else check_prompt_plan
        with TensorRTCacheRunner(bundle, engine, plan=entry) as cached:
            parity = check(here, engine, cached, cached.device)
            facts, held = cached.inspect(), cached.activation_bytes
    else:
        with TensorRTRunner(bundle, engine, plan=entry) as whole:
            parity, facts, held = check_plan(here, engine, whole), whole.inspect(), whole.activation_bytes
    return replace(entry, activation_bytes=held, layers=layer_kinds(facts), parity=parity)


def layer_kinds(text: str) -> dict[str, int]:
    """How many layers of each kind a plan has, by the inspector's answer. Raises BuildError for anything that neither
    release writes."""
    try:
        kinds = Counter(map(_kind, parse_json(text, strict=False)["Layers"]))
    except (ValueError, KeyError, TypeError) as failure:
        raise BuildError(f"engine inspector: expected its JSON of TensorRT 10 or 11, got {text[:80]!r}") from failure
    return dict(sorted(kinds.items()))


def _kind(layer: Any) -> str:
    return str(layer.get("LayerType", _UNKNOWN_KIND)) if isinstance(layer, dict) else _UNKNOWN_KIND
