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
    from .compiler.compile import compile_bundle as compile
    from .compiler.convert_coda import convert_coda
    from .compiler.job import plan
    from .compiler.nest.nest import nest
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
        ParityError,
        PlanError,
        ProfileError,
        SelectionError,
        SliceError,
        UnsupportedModelError,
    )
    from .parity.check import ParityReport, check_parity
    from .profiles.budget import BudgetSpec
    from .profiles.compile_request import CompileRequest
    from .profiles.nest_request import ConversionSettings
    from .runtime.answer import Answer
    from .runtime.device.threads import use_process_wide_threads
    from .runtime.generation.generation import Generation
    from .runtime.generation.row import Generated
    from .runtime.generation.session import Session
    from .runtime.load import load
    from .runtime.model import ElasticModel
    from .runtime.retrieval.compare import compare
    from .runtime.retrieval.index import Index, index
    from .tools.functions import (
        bench,
        bench_requests,
        calibrate,
        calibrate_drafts,
        consistency,
        measure,
        search,
    )

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
    "ElasticModel",
    "ExportError",
    "Generated",
    "Generation",
    "Index",
    "InputError",
    "MeasurementError",
    "NestforgeError",
    "OutputError",
    "ParityError",
    "ParityReport",
    "PlanError",
    "ProfileError",
    "SelectionError",
    "Session",
    "SliceError",
    "UnsupportedModelError",
    "__version__",
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
    "search",
    "use_process_wide_threads",
    "verify",
]

_HOMES = {
    **{name: ("errors", name) for name in __all__ if name.endswith("Error")},
    "Answer": ("runtime.answer", "Answer"),
    "BudgetSpec": ("profiles.budget", "BudgetSpec"),
    "Bundle": ("bundle.open_bundle", "Bundle"),
    "CompileRequest": ("profiles.compile_request", "CompileRequest"),
    "ConversionSettings": ("profiles.nest_request", "ConversionSettings"),
    "ElasticModel": ("runtime.model", "ElasticModel"),
    "Generated": ("runtime.generation.row", "Generated"),
    "Generation": ("runtime.generation.generation", "Generation"),
    "ParityReport": ("parity.check", "ParityReport"),
    "Index": ("runtime.retrieval.index", "Index"),
    "Session": ("runtime.generation.session", "Session"),
    "bench": ("tools.functions", "bench"),
    "bench_requests": ("tools.functions", "bench_requests"),
    "calibrate": ("tools.functions", "calibrate"),
    "calibrate_drafts": ("tools.functions", "calibrate_drafts"),
    "check_parity": ("parity.check", "check_parity"),
    "compare": ("runtime.retrieval.compare", "compare"),
    "compile": ("compiler.compile", "compile_bundle"),
    "consistency": ("tools.functions", "consistency"),
    "convert_coda": ("compiler.convert_coda", "convert_coda"),
    "index": ("runtime.retrieval.index", "index"),
    "load": ("runtime.load", "load"),
    "measure": ("tools.functions", "measure"),
    "nest": ("compiler.nest.nest", "nest"),
    "open_bundle": ("bundle.open_bundle", "open_bundle"),
    "plan": ("compiler.job", "plan"),
    "search": ("tools.functions", "search"),
    "use_process_wide_threads": ("runtime.device.threads", "use_process_wide_threads"),
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
