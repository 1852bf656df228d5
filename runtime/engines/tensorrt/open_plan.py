"""A plan opened as the engine of a bundle: found for this GPU, its bytes checked, given its weights, described."""

from __future__ import annotations

from collections.abc import Sequence

import tensorrt as trt

from ....bundle.device_files.plan_index import PlanEntry, plan_for, read_plan
from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.entries.tensor_spec import TensorSpec
from ....bundle.manifest import WEIGHTS_NAME
from ....bundle.open_bundle import Bundle
from ....bundle.shape_profile import shape_profiles
from ....errors import BundleCorruptError, BundleIncompatibleError
from ...device.cuda_memory import free_bytes
from ...graphs.engine_graph import store_initializers
from .engine import Log, open_engine, refit, tensors_of, this_gpu
from .layout import plan_problem


def open_plan(
    bundle: Bundle,
    engine: EngineEntry,
    plan: PlanEntry | None,
    device: int,
    interface: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    own_bytes: int,
    log: Log,
) -> trt.ICudaEngine:
    """The plan of ``engine`` on the GPU ``device``, the calling thread's; ``plan`` may be given by who has just built
    it. ``interface`` is what the manifest says of its inputs and outputs, ``own_bytes`` is what a run
    takes for them.

    Raises BundleIncompatibleError where there is no plan that may run here, or too little memory, BundleCorruptError
    for one that is not this engine.
    """
    where = f"engine {engine.id}"
    plan = plan or plan_for(bundle, engine, this_gpu(device))
    data = read_plan(bundle, plan)
    _require_memory(engine, max(len(data), _weight_bytes(bundle, engine)) + plan.activation_bytes + own_bytes)
    opened = open_engine(where, data, plan.options.version_compatible, log)
    if plan.options.strip_weights:
        store_initializers(bundle, engine)
        with bundle.held(engine.file, WEIGHTS_NAME):
            refit(where, opened, bundle.file(engine.file), log)
    profiles = shape_profiles(bundle.manifest, engine)
    if problem := plan_problem(*interface, engine.bucket, profiles, tensors_of(opened)):
        raise BundleCorruptError(f"{where}: {plan.file}: {problem}")
    return opened


def _weight_bytes(bundle: Bundle, engine: EngineEntry) -> int:
    return engine.weight_bytes or bundle.manifest.submodel(engine.submodel).weight_bytes


def _require_memory(engine: EngineEntry, needed: int) -> None:
    """``needed`` is a lower bound: the plan or its weights, activations of one run, its inputs and outputs."""
    free = free_bytes()
    if needed > free:
        raise BundleIncompatibleError(
            f"engine {engine.id}: needs at least {needed / 1e6:.1f} MB of the GPU's memory, {free / 1e6:.1f} MB are "
            "free; close other programs on it, or choose a smaller submodel"
        )
