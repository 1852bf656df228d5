"""A structural trial: a compile of a model like the user's of two layers, or one of each kind, and narrow widths, which
is thrown away.

A compile that fails by the model's class, its configuration or the options fails there too, within seconds; nothing is
said of the weights, of sizes and of times.
"""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..bundle.open_bundle import open_bundle
from ..errors import BuildError, NestforgeError
from ..exporters.checkpoints.checkpoint import MODULES_FILE, Checkpoint
from ..exporters.depth import require_layers
from ..exporters.hugging_face.small_model import SmallCopy, save_small_copy
from ..exporters.source import checkpoint_at
from ..profiles.backends import BACKENDS
from ..profiles.budget import BudgetSpec
from ..profiles.compile_request import CompileRequest
from ..profiles.load_profile import requested_profile
from .compile import compile_bundle
from .job import resolve

# Neurons of the small model's FFN are 48 times the scale: six times the width that hardware takes as one.
_WIDTHS_A_SCALE = 8
# Options of a request whose values are of the true sizes.
_OF_SIZES = (
    "budgets",
    "submodels",
    "slices",
    "slicing_table",
    "tasks",
    "lora_rank",
    "mergeable",
    "pairs",
    "dimensions",
)


@dataclass(frozen=True)
class TrialReport:
    """Findings of a trial: ``changes`` are its sizes by name, before and after, ``kept_whole``
    what cannot shrink and why, ``untried`` what the trial leaves open."""

    model: str
    model_class: str
    family: str
    parameters: int
    changes: Mapping[str, tuple[Any, Any]]
    axes: tuple[str, ...]
    kept_whole: tuple[str, ...]
    submodels: tuple[str, ...]
    engines: int
    precisions: tuple[str, ...]
    buckets: tuple[str, ...]
    proofs: tuple[str, ...]
    notes: tuple[str, ...]
    untried: tuple[str, ...]
    seconds: float


def trial(request: CompileRequest) -> TrialReport:
    """Compiles a small random model of the class and configuration of ``request.model``, with its options, in a
    temporary folder that is removed. The model's weights need not be there.

    Raises BuildError, which names the stage, where a compile would fail; CheckpointError where no small model is made.
    """
    began, stages = time.monotonic(), ["plan"]
    profile = requested_profile(request)
    checkpoint = checkpoint_at(request.model, with_weights=False)

    def report(stage: str, done: float, total: int) -> None:
        stages.append(stage)
        request.progress(stage, done, total)

    with tempfile.TemporaryDirectory(prefix="nestforge-trial-") as made:
        scale = max(2, profile.width_multiple // _WIDTHS_A_SCALE)
        small = save_small_copy(checkpoint, Path(made) / "model", scale, request.text is not None)
        own = _small_request(request, small, Path(made) / "bundle")
        own = replace(own, emit_only=not BACKENDS[profile.backend].runs_graphs, progress=report)
        try:
            if small.layers is not None:
                require_layers(checkpoint, request.exits or (), small.layers)
            source = resolve(own).source
            bundle = open_bundle(compile_bundle(**{name: getattr(own, name) for name in vars(own)}))
        except NestforgeError as failure:
            said = str(failure).replace(str(small.folder), str(request.model)).replace(made, "trial")
            raise BuildError(f"trial of a small {small.model_class}, at {stages[-1]}: {said}") from failure
    manifest = bundle.manifest
    engines = manifest.listed_engines
    return TrialReport(
        model=str(request.model),
        model_class=small.model_class,
        family=manifest.family,
        parameters=small.parameters,
        changes=small.changes,
        axes=tuple(source.spec.kinds),
        kept_whole=source.architecture.kept_whole,
        submodels=tuple(entry.id for entry in manifest.submodels),
        engines=len(engines),
        precisions=tuple(dict.fromkeys(engine.precision for engine in engines)),
        buckets=tuple(dict.fromkeys(str(engine.bucket) for engine in engines)),
        proofs=tuple(dict.fromkeys(proof.suite for proof in manifest.proofs)),
        notes=manifest.notes,
        untried=tuple(_untried(request, checkpoint)),
        seconds=time.monotonic() - began,
    )


def _small_request(request: CompileRequest, small: SmallCopy, output: Path) -> CompileRequest:
    """``request`` for the small model; limits of budgets and ids of submodels are of the true sizes."""
    return replace(
        request,
        model=small.folder,
        output=output,
        overwrite=False,
        budgets={"full": BudgetSpec()},
        submodels=(),
        slices=(),
        slicing_table=None,
        tasks={},
        lora_rank=None,
        mergeable=False,
        pairs=(),
        dimensions=None,
        exits=None if request.exits is None else (1, 2),
        measure=False,
    )


def _untried(request: CompileRequest, checkpoint: Checkpoint) -> list[str]:
    stated = [name for name in _OF_SIZES if getattr(request, name)]
    found = ["weights, sizes, latencies and memory", *(f"`{name}`" for name in stated)]
    found += (
        ["tokenizer and vocabulary (with `text` they are)"] if checkpoint.tokenizer_files and not request.text else []
    )
    return [*found, f"{MODULES_FILE}: modules of sentence-transformers"] if checkpoint.has_modules else found
