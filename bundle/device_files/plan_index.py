"""The plans of a bundle: what each was built from and for, and which of them this host may run.

A plan is native code, bound to a GPU and a release of TensorRT, so it is no part of the portable bundle: it is built
beside it, on the device, and ``plans.json`` lists it. An entry carries a code that only a holder of the plan key can
make (files.py), since a hash in the same folder proves nothing about who wrote both.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import BundleCorruptError, BundleFormatError, BundleIncompatibleError
from ...profiles.backends import BACKENDS
from ...profiles.device_profile import TensorRTOptions
from ...strict import structure, unstructure
from ..entries.engine_entry import EngineEntry
from ..files import KEY_VARIABLE, plan_key, regular_file
from ..manifest import PLANS_NAME
from ..open_bundle import Bundle
from ..read_manifest import is_plain_name
from ..shape_profile import shape_profiles
from .device_file import DEVICE_SCHEMA_VERSION, read_device_file, write_device_file

PLAN_SUFFIX = ".plan"
# Part of every key: raised when the same options build otherwise.
_BUILD_VERSION = 1
# ASCII alone: "²" is a digit to str.isdigit and none to int.
_VERSION_PART = re.compile("[0-9]{1,9}")
_AMPERE_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Gpu:
    """Identity that a plan is bound to: the GPU, its compute capability such as ``8.7``, and the release of
    TensorRT."""

    name: str
    compute_capability: str
    tensorrt: str

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.compute_capability}, TensorRT {self.tensorrt})"


@dataclass(frozen=True)
class PlanParity:
    """How a plan compares with its graph, which was compared with PyTorch: worst figures over ``cases`` inputs.

    ``left_out`` more were not compared: there the two decided otherwise between equals.
    """

    reference: str
    rule: str
    cases: int = field(metadata={"min": 1})
    max_abs: float = field(metadata={"min": 0})
    min_cosine: float
    left_out: int = field(default=0, metadata={"min": 0})


@dataclass(frozen=True)
class PlanEntry:
    """One plan: of the engine whose graph is ``graph``, for ``gpu``. ``activation_bytes`` is what a run
    takes of the GPU beside weights, inputs and outputs; ``layers`` counts what TensorRT made of the graph, by kind.

    ``code`` is made from all else with the key of who built it.
    """

    graph: str
    file: str
    bytes: int = field(metadata={"min": 1})
    sha256: str
    key: str
    gpu: Gpu
    options: TensorRTOptions
    activation_bytes: int = field(metadata={"min": 0})
    seconds: float = field(metadata={"min": 0})
    layers: Mapping[str, int]
    parity: PlanParity
    code: str = ""


@dataclass(frozen=True)
class _Index:
    schema_version: int
    plans: tuple[PlanEntry, ...]


def build_key(bundle: Bundle, engine: EngineEntry, gpu: Gpu, options: TensorRTOptions) -> str:
    """Hash of everything that a plan follows from; two plans of one key are the same plan. Raises BundleFormatError for
    a device profile whose ``budget_at`` is no shape."""
    files = {entry.path: entry.sha256 for entry in bundle.manifest.files}
    facts = [_BUILD_VERSION, files[engine.file], bundle.manifest.weights_sha256 or "", unstructure(gpu), options.key]
    if not engine.bucket.is_static:  # its graph names the free dimensions and does not know their ends
        facts += [profile.key for profile in shape_profiles(bundle.manifest, engine)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read_plans(bundle: Bundle) -> tuple[PlanEntry, ...]:
    """The plans that a bundle's folder lists; none where nothing was built.

    Raises BundleFormatError for what is malformed, BundleCorruptError for a wrong seal.
    """
    data = read_device_file(bundle, PLANS_NAME, "remove it and build the plans again")
    if data is None:
        return ()
    where = str(bundle.path / PLANS_NAME)
    plans = structure(_Index, data, where, BundleFormatError).plans
    for plan in plans:
        if not (is_plain_name(plan.file) and plan.file.endswith(PLAN_SUFFIX)):
            raise BundleFormatError(
                f"{where}: plan {plan.file[:80]!r}; expected a plain name that ends in {PLAN_SUFFIX}"
            )
    return plans


def write_plans(bundle: Bundle, plans: Iterable[PlanEntry]) -> None:
    """Lists ``plans``, each with its code. Raises OutputError."""
    key = plan_key()
    signed = [replace(plan, code=_code(plan, key)) for plan in plans]
    ordered = sorted(signed, key=lambda plan: (plan.graph, plan.gpu.name, plan.gpu.tensorrt, plan.file))
    index = unstructure(_Index(DEVICE_SCHEMA_VERSION, tuple(ordered)))
    write_device_file(bundle, PLANS_NAME, index, "the list of plans")


def plan_for(bundle: Bundle, engine: EngineEntry, gpu: Gpu) -> PlanEntry:
    """The plan of ``engine`` that runs on ``gpu``. Raises BundleIncompatibleError where none may, saying why."""
    plans = [plan for plan in read_plans(bundle) if plan.graph == engine.file]
    if not plans:
        raise BundleIncompatibleError(f"engine {engine.id}: has no plan yet; {_remedy(bundle, engine)}")
    problems = []
    for plan in plans:
        problem = run_problem(plan, gpu)
        if problem is None and plan.key != build_key(bundle, engine, plan.gpu, plan.options):
            problem = "it was built from another graph, other weights or by another release"
        if problem is None:
            _require_own(bundle, engine, plan)
            return plan
        problems.append(f"{plan.file}: {problem}")
    raise BundleIncompatibleError(f"engine {engine.id}: {'; '.join(problems[:3])}; {_remedy(bundle, engine)}")


def run_problem(plan: PlanEntry, gpu: Gpu) -> str | None:
    """Why ``plan`` cannot run on ``gpu``, or None."""
    built, here = _numbers(plan.gpu.tensorrt), _numbers(gpu.tensorrt)
    if plan.options.version_compatible:
        if here < built:
            return f"built by TensorRT {plan.gpu.tensorrt}, this host has the older {gpu.tensorrt}"
    elif plan.gpu.tensorrt != gpu.tensorrt:
        return f"built by TensorRT {plan.gpu.tensorrt}, this host has {gpu.tensorrt}"
    capability = gpu.compute_capability
    match plan.options.hardware_compatibility:
        case "none" if (plan.gpu.name, plan.gpu.compute_capability) != (gpu.name, capability):
            return f"built for {plan.gpu.name} ({plan.gpu.compute_capability}), this host has {gpu.name} ({capability})"
        case "same_compute_capability" if plan.gpu.compute_capability != capability:
            return f"built for compute capability {plan.gpu.compute_capability}, {gpu.name} has {capability}"
        case "ampere_plus" if _numbers(capability) < _AMPERE_CAPABILITY:
            return f"built for compute capability 8.0 and higher, {gpu.name} has {capability}"
    return None


def is_own(plan: PlanEntry) -> bool:
    """Whether ``plan`` was built with this host's plan key. Raises OutputError if the key cannot be read."""
    return hmac.compare_digest(plan.code.encode(), _code(plan, plan_key()).encode())


def read_plan(bundle: Bundle, plan: PlanEntry) -> bytes:
    """The plan's bytes, exactly as they were built. Raises BundleCorruptError.

    They are hashed as they were read, so nobody can exchange them between the check and their use.
    """
    path = bundle.path / plan.file
    try:
        with regular_file(path) as (file, identity):
            data = file.read(plan.bytes) if identity.size == plan.bytes else None
    except (BundleFormatError, BundleCorruptError, OSError):
        raise BundleCorruptError(f"{path}: missing, or no regular file; {_REBUILD}") from None
    if data is None:
        raise BundleCorruptError(f"{path}: {identity.size} bytes, {PLANS_NAME} expects {plan.bytes}; {_REBUILD}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != plan.sha256:
        raise BundleCorruptError(f"{path}: sha256 {digest}, {PLANS_NAME} expects {plan.sha256}; {_REBUILD}")
    return data


def with_plan(plans: Sequence[PlanEntry], plan: PlanEntry) -> list[PlanEntry]:
    """``plans`` with ``plan`` in place of those of the same engine, GPU and TensorRT."""
    return [other for other in plans if (other.graph, other.gpu) != (plan.graph, plan.gpu)] + [plan]


_REBUILD = "remove it and run `nestforge build BUNDLE` on this device"


def _remedy(bundle: Bundle, engine: EngineEntry) -> str:
    build = f"run `nestforge build {bundle.path}` on this device"
    same = (other for other in bundle.manifest.engines if other.submodel == engine.submodel)
    others = any(BACKENDS[other.backend].runs_graphs and other.bucket == engine.bucket for other in same)
    return f"{build}, or use its engines for ONNX Runtime" if others else build


def _require_own(bundle: Bundle, engine: EngineEntry, plan: PlanEntry) -> None:
    if not is_own(plan):
        raise BundleIncompatibleError(
            f"engine {engine.id}: {plan.file} was not built with this host's plan key, and a plan is native code; "
            f"{_remedy(bundle, engine)}, or name the key of who built it in {KEY_VARIABLE}"
        )


def _code(plan: PlanEntry, key: bytes) -> str:
    data: dict[str, Any] = unstructure(replace(plan, code=""))
    return hmac.digest(key, json.dumps(data, sort_keys=True).encode(), "sha256").hex()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if _VERSION_PART.fullmatch(part))
