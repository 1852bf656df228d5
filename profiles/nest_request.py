"""Requests that make an elastic model of an ordinary one: nested, or with conditional adapters. Fields as in a
``CompileRequest``; nothing here needs torch, so that the command line has its options from here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass
from pathlib import Path
from typing import Literal

from ..argument_types import again, document_fields, option, take_numbers, take_types
from ..progress import Progress
from .compile_request import MODEL, OUTPUT, OVERWRITE, PROGRESS

Activation = Literal["relu", "gelu", "gelu_tanh"]
AdapterKind = Literal["parallel", "sequential", "lora"]
Router = Literal["soft_top_k", "sigmoid", "first_k"]
# The tokens whose keys and values the selected ones read: their own, or those of all.
KeysOf = Literal["selected", "all"]
MOST_ADAPTER_SIZE, MOST_LABELS, MOST_SEED = 16_384, 65_536, 2**32 - 1
SEED = option("Random seed.", 0, min=0, max=2**63 - 1)


@document_fields
@dataclass(frozen=True)
class NestRequest:
    """The arguments of ``nestforge.nest``. Raises InputError for a field of another type or beyond its bounds."""

    model: str | Path = again(MODEL)
    text: str | Path = option(
        "UTF-8 text, one example a line, like the model's later inputs; about one line in five is held out.",
        MISSING,
        metavar="FILE",
    )
    output: str | Path = again(OUTPUT)
    _: KW_ONLY
    overwrite: bool = again(OVERWRITE)
    levels: Mapping[str, Sequence[float]] | None = option(
        "Granularities to train of an axis kind, such as ffn=0.5,1. Default: ffn=0.25,0.5,0.75,1."
    )
    minutes: float | None = option(
        "Training time, in minutes, beside loading and comparing. Default: 8.", above=0, unit="minutes"
    )
    steps: int | None = option(
        "Training length, in batches, in place of minutes: the same steps and seed give the same bytes.", min=1
    )
    seed: int = again(SEED)
    progress: Progress = again(PROGRESS)

    def __post_init__(self) -> None:
        take_types(self)
        take_numbers(self, ("minutes", "steps", "seed"))


@document_fields
@dataclass(frozen=True, kw_only=True)
class ConversionSettings:
    """Adapters and routers of CODA, drawn with ``seed``; names as in ``CodaConfig``. Raises InputError for a field of
    another type or beyond its bounds."""

    adapter: AdapterKind = option(
        "Adapter beside a layer, behind it, or as low-rank terms of queries and values.", "parallel"
    )
    adapter_size: int = option("Neurons of each layer's adapter, or its rank.", 64, min=1, max=MOST_ADAPTER_SIZE)
    adapter_activation: Activation | None = option("Activation of adapters; LoRA has none. Default: relu.")
    router: Router = option("Choice and gate of a layer's tokens.", "soft_top_k")
    keys_of: KeysOf = option(
        "Keys and values that chosen tokens read: their own (k-to-k), or those of all (k-to-all).", "all"
    )
    reduction: int = option("Reduction r to train at: a layer computes ceil(n / r) of n tokens.", 3, min=1)
    reductions: tuple[int, ...] | None = option(
        "Reductions that compiles offer, such as 8,5,3,1. Default: 8,5,3,2,1 and the trained one."
    )
    dense_layers: tuple[int, ...] = option("Layers that stay dense, such as 0,11; 0 is nearest the input.", ())
    num_labels: int | None = option(
        "Number of classes of a classifier of the mean of a row's tokens. Default: no classifier.",
        min=2,
        max=MOST_LABELS,
    )
    seed: int = again(SEED, help="Random seed of adapters, routers and classifier.", max=MOST_SEED)

    def __post_init__(self) -> None:
        take_types(self)
        take_numbers(self, ("adapter_size", "reduction", "num_labels", "seed"))
