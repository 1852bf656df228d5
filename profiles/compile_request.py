"""A compile request: the model, the device, and what replaces the profile's own settings.

Every field states its meaning once, as the ``help`` of its metadata: the options of the command line, their help, the
reference pages and the signatures of ``nestforge.compile`` and ``nestforge.plan`` come from here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..argument_types import again, document_fields, option, options_of, take_numbers, take_types
from ..bucket import Bucket
from ..elastic import Pairs
from ..errors import InputError, PlanError
from ..progress import Progress, silent
from .backends import BackendName
from .budget import BudgetSpec
from .device_profile import DeviceProfile, PromotionOrder
from .precision import Precision
from .probe_host import HOST_PROFILE_NAME

Include = Literal["budgets", "levels", "ladder"]
# Name of a task, part of a file's name on every platform.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_PAIR = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)
# Fields of every request that makes a folder.
MODEL = option(
    "Model folder, of Hugging Face or a format of nestforge: config.json, safetensors; or hub:OWNER/NAME@REVISION.",
    MISSING,
)
OUTPUT = option("Folder to write; must not exist.", MISSING, required=True, metavar="FOLDER")
OVERWRITE = option("Replace an output that exists, in one step, once the new one is whole.", False)
PROGRESS = option("Called as work proceeds: stage, done, total.", silent)


@document_fields
@dataclass(frozen=True)
class CompileRequest:
    """The arguments of ``nestforge.compile`` and ``nestforge.plan``; a plan ignores those that say how engines are
    made. Raises InputError for a field of another type or beyond its bounds."""

    model: Any = again(
        MODEL,
        help=f"{MODEL.metadata['help']} From Python also a torch.nn.Module, with example inputs.",
    )
    profile: str | Path | DeviceProfile = option(
        "Built-in device profile or a YAML file; an unknown name lists the built-in ones.",
        HOST_PROFILE_NAME,
        metavar="NAME|FILE",
    )
    output: str | Path = again(OUTPUT, default="model.bundle", required=False)
    overwrite: bool = again(OVERWRITE)
    text: str | Path | None = option(
        "UTF-8 text, one example a line, to rank axes and measure quality. Default: ranked by magnitude, no quality.",
        metavar="FILE",
    )
    data: str | Path | None = option(
        "NPZ file in place of text: an array per input, rows first, and perhaps 'labels'.", metavar="FILE"
    )
    levels: Mapping[str, Sequence[float]] | None = option(
        "Granularities of an axis kind, such as ffn=0.25,0.5,1. Default: the profile's, else S/M/L/XL."
    )
    promotion_order: PromotionOrder | None = option(
        "Order of promotion between two levels. Default: the profile's, else increasing (the last ones)."
    )
    budgets: Mapping[str, BudgetSpec] | None = option(
        "Budget in place of the profile's, such as 'ffn_parameters<=94.4M' or 'latency_ms<=50 %'.", option="budget"
    )
    submodels: Sequence[str] = option(
        "Additional submodel, by label (M+2: two layers promoted from M) or id (ffn768x4_1536x2).",
        (),
        option="submodel",
        metavar="ID",
    )
    slices: Sequence[str | Path] = option(
        "Folder with a published slice of the model: builds that submodel too.",
        (),
        option="slice",
        metavar="FOLDER",
    )
    slicing_table: str | Path | None = option(
        "Google's table of slices of Gemma 3n: builds the submodel of each row, under its name.",
        option="slices",
        metavar="FILE.csv",
    )
    buckets: Sequence[str | Bucket] | None = option(
        "Input shape, such as 1x128, or a range of them, such as 1x1..128. Default: the profile's.", option="bucket"
    )
    budget_at: str | Bucket | None = option(
        "Shape at which budgets limit latency and FLOPs, such as 1x128. Default: the profile's."
    )
    exits: Sequence[int] | None = option(
        "Layers after which the model may answer, such as 3,6,9: of its exits, or of a model that was trained for it "
        "(AdaptiveLayer, LayerSkip). The last always is one. Default: every exit, or what its folder lists.",
        option="exit_layers",
    )
    dimensions: Sequence[int] | None = option(
        "Numbers to which the embedding may be cut, such as 768,512,256. Default: those that the model lists, else any."
    )
    pairs: Sequence[str] = option(
        "Layers with the numbers to which the embedding after them may be cut, such as 6:128, where training paired "
        "them (Starbucks): in place of exit layers and dimensions.",
        (),
        option="pair",
        metavar="LAYERS:DIMENSIONS",
    )
    variants: Mapping[str, str] | None = option(
        "Variant of a computation in engines, such as moe.combine=one_hot. Default: the profile's, else the "
        "cheapest on the device.",
        option="variant",
    )
    backend: BackendName | None = option("Back end in place of the profile's, such as openvino; see docs/openvino.md.")
    precisions: Sequence[Precision] | None = option(
        "Precision of engines, such as fp16; of several, such as fp32,int8, a budget takes the highest that it "
        "affords. Default: the profile's.",
        option="precision",
    )
    tasks: Mapping[str, str | Path] = field(
        default_factory=dict,
        metadata={
            "help": "Task on the frozen model, by name. Engines then take its tensors as inputs.",
            "option": "task",
        },
    )
    lora_rank: int | None = option(
        "Least rank of engines for PEFT adapters, so that add-task takes larger ones. Default: the largest given.",
        min=1,
        max=2**16,
    )
    mergeable: bool = option(
        "Engines, too, into whose weights a task is merged when they are opened: faster, at a model's memory each.",
        False,
    )
    include: Include = option(
        "Submodels to build: those that budgets chose; also every level; also every rung between.", "levels"
    )
    emit_only: bool = option(
        "For TensorRT: write proven graphs alone; `nestforge build BUNDLE` makes their plans on the device.", False
    )
    generate: bool = option(
        "KV-cache (decode) engines of a causal language model, too, for `nestforge generate`.", False
    )
    measure: bool = option("Time engines on this host; else latencies are predicted from the profile's rates.", True)
    command: Sequence[str] = option("The command line to record in the bundle.", ())
    example_inputs: Any = option(
        "Inputs of a torch.nn.Module: tensors by the names of forward's parameters, or in their order."
    )
    dynamic: Mapping[str, Sequence[str | None]] | None = option(
        "Dimensions of a module's inputs that may change, such as {'x': ('batch', 'sequence', None)}. Default: the "
        "first, the batch."
    )
    progress: Progress = field(default=silent, compare=False, repr=False, metadata=PROGRESS.metadata)

    def __post_init__(self) -> None:
        """Raises InputError for a field of another type or beyond its bounds, names that no tasks may have, and
        examples of both kinds."""
        take_types(self)
        take_numbers(self, ("lora_rank",))
        require_names(self.tasks)
        if isinstance(self.model, str | Path):
            given = [name for name in ("example_inputs", "dynamic") if getattr(self, name) is not None]
            if given:
                raise InputError(f"{given[0]}: expected with a torch.nn.Module alone; a folder says what it takes")
        elif not is_module(self.model):
            shown = f"{type(self.model).__name__} {self.model!r:.80}"
            raise InputError(f"model: expected str, Path or torch.nn.Module, got {shown}")
        if self.text is not None and self.data is not None:
            raise InputError("text and data: expected one of them, the examples that rank the axes and show quality")
        if self.layer_dimensions and (self.exits is not None or self.dimensions is not None):
            raise InputError("pairs: they name exit layers and dimensions; leave out `exits` and `dimensions`")

    @property
    def layer_dimensions(self) -> Pairs | None:
        """``pairs`` as numbers; None where there are none. Raises InputError for one that is none."""
        return tuple(map(_pair, self.pairs)) or None

    @property
    def shapes(self) -> tuple[Bucket, ...] | None:
        """``buckets`` as such; None where the profile's count. Raises PlanError."""
        if self.buckets is not None and not self.buckets:
            raise PlanError("buckets: expected at least one, such as 1x128; None takes the profile's")
        return None if self.buckets is None else tuple(map(_shape, self.buckets))

    @property
    def budget_shape(self) -> Bucket | None:
        """``budget_at`` as a bucket. Raises PlanError."""
        return None if self.budget_at is None else _shape(self.budget_at)


# Those that a command line, or a file, can state.
JOB_OPTIONS = tuple(
    name for name in options_of(CompileRequest) if name not in ("command", "example_inputs", "dynamic", "progress")
)


def is_module(model: object) -> bool:
    """Whether ``model`` is a torch.nn.Module, without an import of torch."""
    return any(
        (each.__module__, each.__name__) == ("torch.nn.modules.module", "Module") for each in type(model).__mro__
    )


def require_names(names: Collection[str], taken: Iterable[str] = ()) -> None:
    """Raises InputError for a name that no task may have, and for one that is ``taken`` or stands twice: on some file
    systems case makes no difference."""
    known = [name.lower() for name in (*taken, *names)]
    for name in names:
        if problem := name_problem(name):
            raise InputError(problem)
        if known.count(name.lower()) > 1:
            raise InputError(f"task {name}: there is another of this name; choose another name")


def name_problem(name: str) -> str | None:
    """Why no task can be called ``name``, or None."""
    if _NAME.fullmatch(name):
        return None
    return f"task {name!r:.80}: expected a name of at most 64 letters, digits, '.', '_' and '-', not '.' or '-' first"


def _pair(given: str) -> tuple[int, int]:
    found = _PAIR.fullmatch(given)
    if found is None:
        raise InputError(f"pairs: expected layers:dimensions, such as 6:128, got {given!r:.80}")
    return int(found[1]), int(found[2])


def _shape(given: str | Bucket) -> Bucket:
    if isinstance(given, Bucket):
        return given
    try:
        return Bucket.parse(given)
    except ValueError as failure:
        raise PlanError(str(failure)) from failure
