"""nestforge: one trained elastic model, one verified engine per device budget.

Names are imported on first use, so that ``import nestforge`` costs nothing and a device never loads the compiler.
"""

from __future__ import annotations

import os
from importlib import import_module

# ONNX Runtime reads it where it is imported, and cannot be stopped later: docs/deployment.md
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

TYPE_CHECKING = False  # as in typing, which takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

    from .bundle.open_bundle import Bundle, open_bundle
    from .compiler.add_task import add_task
    from .compiler.compile import compile_bundle as compile
    from .compiler.convert_coda import convert_coda
    from .compiler.job import plan
    from .compiler.nest import nest
    from .compiler.planning.plan import Plan
    from .compiler.verify import VerifyReport
    from .compiler.verify import verify_bundle as verify
    from .errors import (
        BuildError,
        BundleCorruptError,
        BundleError,
        BundleFormatError,
        BundleIncompatibleError,
        CapacityError,
        CheckpointError,
        ExportError,
        InputError,
        MeasurementError,
        NestforgeError,
        OutputError,
        OverloadError,
        ParityError,
        PlanError,
        ProfileError,
        SelectionError,
        SliceError,
        UnsupportedModelError,
    )
    from .exporters.families.coda.tasks import save_task
    from .parity.check import ParityReport, check_parity
    from .profiles.budget import BudgetSpec
    from .profiles.compile_request import CompileRequest
    from .profiles.nest_request import ConversionSettings
    from .runtime.answer import Answer, Limit, RowRun
    from .runtime.consistency.measure import consistency
    from .runtime.description import SubmodelInfo
    from .runtime.device.threads import use_process_wide_threads
    from .runtime.generation.generation import Generation
    from .runtime.generation.generator import Generator
    from .runtime.generation.options import GenerationRequest
    from .runtime.generation.row import DraftedTokens, Generated, GeneratedRow, Piece, Run
    from .runtime.generation.session import Session
    from .runtime.load import load
    from .runtime.model import ElasticModel
    from .runtime.retrieval.compare import compare
    from .runtime.retrieval.index import Index, index
    from .tools.bundle_bench import bench
    from .tools.functions import calibrate, calibrate_drafts, measure, search
    from .tools.traffic_bench import bench_requests

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "BudgetSpec",
    "BuildError",
    "Bundle",
    "BundleCorruptError",
    "BundleError",
    "BundleFormatError",
    "BundleIncompatibleError",
    "CapacityError",
    "CheckpointError",
    "CompileRequest",
    "ConversionSettings",
    "DraftedTokens",
    "ElasticModel",
    "ExportError",
    "Generated",
    "GeneratedRow",
    "Generation",
    "GenerationRequest",
    "Generator",
    "Index",
    "InputError",
    "Limit",
    "MeasurementError",
    "NestforgeError",
    "OutputError",
    "OverloadError",
    "ParityError",
    "ParityReport",
    "Piece",
    "Plan",
    "PlanError",
    "ProfileError",
    "RowRun",
    "Run",
    "SelectionError",
    "Session",
    "SliceError",
    "SubmodelInfo",
    "UnsupportedModelError",
    "VerifyReport",
    "__version__",
    "add_task",
    "bench",
    "bench_requests",
    "calibrate",
    "calibrate_drafts",
    "check_parity",
    "compare",
    "compile",
    "consistency",
    "convert_coda",
    "index",
    "load",
    "measure",
    "nest",
    "open_bundle",
    "plan",
    "save_task",
    "search",
    "use_process_wide_threads",
    "verify",
]

# By module.
_NAMES = {
    "errors": [name for name in __all__ if name.endswith("Error")],
    "bundle.open_bundle": ["Bundle", "open_bundle"],
    "compiler.add_task": ["add_task"],
    "compiler.convert_coda": ["convert_coda"],
    "compiler.job": ["plan"],
    "compiler.nest": ["nest"],
    "compiler.planning.plan": ["Plan"],
    "compiler.verify": ["VerifyReport"],
    "exporters.families.coda.tasks": ["save_task"],
    "parity.check": ["ParityReport", "check_parity"],
    "profiles.budget": ["BudgetSpec"],
    "profiles.compile_request": ["CompileRequest"],
    "profiles.nest_request": ["ConversionSettings"],
    "runtime.answer": ["Answer", "Limit", "RowRun"],
    "runtime.consistency.measure": ["consistency"],
    "runtime.description": ["SubmodelInfo"],
    "runtime.device.threads": ["use_process_wide_threads"],
    "runtime.generation.generation": ["Generation"],
    "runtime.generation.generator": ["Generator"],
    "runtime.generation.options": ["GenerationRequest"],
    "runtime.generation.row": ["DraftedTokens", "Generated", "GeneratedRow", "Piece", "Run"],
    "runtime.generation.session": ["Session"],
    "runtime.load": ["load"],
    "runtime.model": ["ElasticModel"],
    "runtime.retrieval.compare": ["compare"],
    "runtime.retrieval.index": ["Index", "index"],
    "tools.bundle_bench": ["bench"],
    "tools.functions": ["calibrate", "calibrate_drafts", "measure", "search"],
    "tools.traffic_bench": ["bench_requests"],
}
_HOMES = {
    **{name: (module, name) for module, names in _NAMES.items() for name in names},
    "compile": ("compiler.compile", "compile_bundle"),
    "verify": ("compiler.verify", "verify_bundle"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(import_module(f".{module}", __name__), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
