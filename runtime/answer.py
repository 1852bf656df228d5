"""Answer to a request: outputs, and which engine answered, why, and how its input was changed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..bucket import Bucket
from ..tables import as_html
from .engines.residency import Residency
from .exits.policy import ExitPolicy
from .inputs.arrays import Array


@dataclass(frozen=True)
class Padding:
    """The input's own shape and the bucket it was filled up to; outputs are cut back to the former."""

    given: Bucket
    filled: Bucket

    def __str__(self) -> str:
        return f"{self.given.label} -> {self.filled.label}"


class Timings(NamedTuple):
    """Milliseconds. ``open`` is more than 0 where this request was the first to need its engine; ``run`` is the whole
    chain where exits were open."""

    encode: float
    dispatch: float
    open: float
    run: float


class Limit(NamedTuple):
    """The limit in time that a request had, ``latency_ms`` or ``deadline_ms``, and what was taken of it, in
    milliseconds: by the run, or all runs, of a latency, and from call to answer of a deadline."""

    name: str
    allowed_ms: float
    took_ms: float

    @property
    def kept(self) -> bool:
        """Whether the answer came within the limit."""
        return self.took_ms <= self.allowed_ms

    def __str__(self) -> str:
        return f"`{self.name}={self.allowed_ms:g}` {'kept' if self.kept else 'missed'}: took {self.took_ms:.3g} ms"


class RowRun(NamedTuple):
    """One of several runs that answered a request: the numbers of its ``rows`` [n] (int64), the ``engine`` that ran
    (of a chain the first), how its rows were padded, None for not at all, and what it took."""

    rows: Array
    engine: str
    padding: Padding | None
    run_ms: float

    def __str__(self) -> str:
        rows = f"row {self.rows[0]}" if len(self.rows) == 1 else f"{len(self.rows)} rows"
        return f"{rows}{f' padded {self.padding}' if self.padding else ''} in {self.run_ms:.2f} ms"


@dataclass(frozen=True, eq=False)
class ExitRows:
    """How each of ``B`` rows left the chain of segments.

    ``index`` [B] of the exit that answered (from 0) and ``layer`` [B], how many layers ran (int64); ``entropy`` [B]
    there in nats (float32); ``flops`` [B] that the row cost (int64), and ``share`` [B], these over what a row of the
    whole engine costs (float64). ``policy`` decided.
    """

    index: Array
    layer: Array
    entropy: Array
    flops: Array
    share: Array
    policy: ExitPolicy

    def __str__(self) -> str:
        layers, rows = np.unique(self.layer, return_counts=True)
        counts = (f"{n} after layer {layer}" for layer, n in zip(layers.tolist(), rows.tolist(), strict=True))
        return f"rows left: {', '.join(counts)}"


@dataclass(slots=True, repr=False, eq=False)
class Answer:
    """Outputs by name, owned by the caller, and how they came about.

    ``truncated`` holds the rows of a text input that were cut to fit. ``reason`` says why this submodel was chosen, and
    whether by its exits. With ``exits`` several engines answered: ``engine`` and ``bucket`` are the first of them, and
    ``padding`` says what all rows together were filled up, or cut, to. ``routing`` are the engine's routes by name
    (int64) where they were requested, of its whole bucket: padding takes part in them. ``prompt`` stood before every
    text, the model's default one too; empty for none. ``task`` answered, None for the base.

    ``limit`` says whether the request's limit in time was kept, None where it had none: the choice goes by what runs
    take as a rule. ``first_run``: an engine ran for the first time since it was opened, with cold caches and memory
    still to be taken, which often takes several times as long as a later run.

    ``runs`` is empty where all rows were answered at once. Where no engine takes so many, it has the runs of the
    submodel in their order: ``engine`` and ``bucket`` are those of the first, ``timings`` of all together, ``padding``
    says what all together were filled up to, and outputs are 0 at steps beyond the longest row of a run.

    ``dimensions`` are those that the embedding was cut to, None where it is whole.
    """

    outputs: Mapping[str, Array]
    submodel: str
    engine: str
    bucket: Bucket
    residency: Residency
    reason: str
    padding: Padding | None
    truncated: tuple[int, ...]
    timings: Timings
    exits: ExitRows | None = None
    routing: Mapping[str, Array] | None = None
    prompt: str = ""
    task: str | None = None
    runs: tuple[RowRun, ...] = ()
    limit: Limit | None = None
    first_run: bool = False
    dimensions: int | None = None

    def __getitem__(self, name: str) -> Array:
        return self.outputs[name]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in self.outputs.items())
        padding = f", padded {self.padding}" if self.padding else ""
        truncated = f", {len(self.truncated)} truncated" if self.truncated else ""
        exits = f", {self.exits}" if self.exits else ""
        prompt = f", prompt {self.prompt!r:.80}" if self.prompt else ""
        task = f"task {self.task}, " if self.task is not None else ""
        runs = f" in {len(self.runs)} runs" if self.runs else ""
        first = " (first run)" if self.first_run else ""
        limit = f", {self.limit}" if self.limit else ""
        cut = f", cut to {self.dimensions} dimensions" if self.dimensions is not None else ""
        figures = f"{self.timings.run:.2f} ms{first}{runs}{limit}{padding}{truncated}{prompt}{cut}{exits}"
        return f"Answer({shapes}; {task}{self.engine}, {figures}; {self.reason})"

    def _repr_html_(self) -> str:
        facts: list[tuple[str, object]] = [
            ("because", self.reason),
            ("engine", f"{self.engine}, weights {self.residency}"),
            ("run", f"{self.timings.run:.2f} ms{' (first run)' if self.first_run else ''}"),
            *((f"run {number}", run) for number, run in enumerate(self.runs, 1)),
        ]
        for name in ("limit", "padding", "truncated", "prompt", "dimensions", "task", "exits"):
            if value := getattr(self, name):
                facts.append((name, value))
        rows = [(name, array.dtype, "x".join(map(str, array.shape))) for name, array in self.outputs.items()]
        return as_html(f"Answer of {self.submodel}", facts, ("output", "dtype", "shape"), rows)
