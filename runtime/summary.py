"""The content of a bundle as facts and tables of text: the command line prints them, report.md has them."""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log

from ..bucket import Bucket
from ..bundle.build_record import BuildRecord, Latency, LatencyPoint, is_noisy, noisy_figures
from ..bundle.device_files.plan_index import PlanParity
from ..bundle.entries.engine_entry import EngineEntry, ParityOutput, ParityRouting
from ..bundle.entries.generation_entry import CachedLayer, GenerationEntry, cache_bytes
from ..bundle.figures import cell, heading, present, quality_warnings
from ..bundle.manifest import Manifest, Quality
from ..elastic import Axis
from ..profiles.device_profile import budget_bucket_of, budget_shape_of
from ..tables import Table
from .dimensions import listed

# A capacity that many texts need.
_TOKENS = 2048
# Units of metadata whose name does not say what it counts.
_UNITS = {"capacity": "slots"}
# Units of kinds of axes whose name does not say what they count.
_AXIS_UNITS = {"moe.capacity_factor": " %", "moe.group_size": " tokens", "sequence": " tokens", "depth": " layers"}


class ShortNames:
    """Called with a text: the same with every submodel's id as its label, ``M+2@b1-s128`` of an engine's too."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        ids = "|".join(re.escape(name) for name in sorted(labels, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<![\w-])(?:{ids or '(?!)'})(?![\w-])")

    @staticmethod
    def of(manifest: Manifest) -> ShortNames:
        return ShortNames({entry.id: entry.label for entry in manifest.submodels})

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._labels[found[0]], text)

    @property
    def ids(self) -> Table:
        """One row a submodel: its label and its id."""
        return Table(["submodel", "id"], [[label, name] for name, label in self._labels.items()])


def bundle_facts(manifest: Manifest, build: BuildRecord) -> list[tuple[str, str]]:
    """Name and value of what holds for the whole bundle."""
    short = ShortNames.of(manifest)
    total = sum(entry.bytes for entry in manifest.files)
    host = ", ".join(str(build.host[key]) for key in ("cpu", "system") if key in build.host)
    return [
        ("model", f"{manifest.name} ({manifest.family})"),
        *((("fetched", f"hub:{hub}"),) if (hub := manifest.provenance.hub) is not None else ()),
        ("axes", describe_axes(manifest.axes)),
        ("order", _ranking(manifest)),
        ("precision", ", ".join(dict.fromkeys(engine.precision for engine in manifest.engines))),
        *((f"{one.name} cut to", listed(one.dimensions)) for one in manifest.outputs if one.dimensions is not None),
        *_exit_facts(manifest),
        *cache_facts(sizes_of(manifest.generation)),
        *_proof_facts(manifest),
        ("files", f"{len(manifest.files)}, {total / 1e6:.1f} MB in all"),
        ("profile", str(manifest.provenance.profile.get("name", "-"))),
        ("created", f"{build.created} by nestforge {manifest.provenance.tools.get('nestforge', '?')} on {host or '?'}"),
        *((f"budget {budget.name}", short(f"{budget.submodel}: {budget.reason}")) for budget in manifest.budgets),
        *(("note", note) for note in manifest.notes),
        *(("warning", warning) for warning in (*quality_warnings(manifest), *latency_warnings(build.latencies))),
    ]


def latency_warnings(latencies: Sequence[Latency]) -> list[str]:
    """One line where measured ones are noisy: how many, why the first one is, and what to do."""
    noisy = noisy_figures((latency.engine, noise) for latency in latencies for noise in latency.noises)
    return [f"{noisy}; in a calm moment `nestforge measure BUNDLE` measures again"] if noisy else []


def submodel_table(manifest: Manifest, build: BuildRecord) -> Table:
    """One row a submodel: size, latency at the shape of budgets, the figures of quality that the model has, and those
    that a published table states."""
    wholes = [engine for engine in manifest.engines if engine.segment is None]
    requested = _budget_at(manifest)
    bucket = budget_bucket_of({engine.bucket for engine in wholes}, requested)
    shape = budget_shape_of(bucket, requested)
    places = {entry.id: entry.at(bucket) for entry in manifest.submodels}
    engines = {engine.submodel: engine for engine in wholes if engine.bucket == places[engine.submodel]}
    latencies = {latency.engine: _at(latency, shape) for latency in build.latencies}
    budgets: dict[str, list[str]] = {}
    for budget in manifest.budgets:
        budgets.setdefault(budget.submodel, []).append(budget.name)
    figures = present(entry.quality.figures for entry in manifest.submodels if entry.quality)
    stated = list(dict.fromkeys(column for entry in manifest.submodels for column in entry.states or ()))
    rows = []
    for entry in manifest.submodels:
        rows.append(
            [
                "/".join(entry.labels) or entry.id,
                f"{entry.parameters / 1e6:.2f}",
                f"{entry.weight_bytes / 1e6:.1f}",
                *_latency_cells(engines.get(entry.id), latencies),
                *(_quality_cell(entry.quality, name) for name in figures),
                *(f"{value:g}" if (value := (entry.states or {}).get(name)) is not None else "-" for name in stated),
                ", ".join(budgets.get(entry.id, [])) or "-",
            ]
        )
    at = f"ms at {_size(latencies, engines.values()) or shape}"
    columns = ["submodel", "M params", "weights MB", f"predicted {at}", f"measured {at}"]
    chosen = [number for number, entry in enumerate(manifest.submodels) if entry.id in budgets]
    return Table([*columns, *map(heading, figures), *stated, "budgets"], rows, chosen)


def engine_table(manifest: Manifest, build: BuildRecord) -> Table:
    """One row an engine: how it came about, its costs, and its parity figures (worst over outputs and cases)."""
    latencies = {latency.engine: latency.largest for latency in build.latencies}
    short = ShortNames.of(manifest)
    return Table.of(
        manifest.engines,
        {
            "engine": lambda engine: short(engine.id),
            "backend": lambda engine: engine.backend,
            "emitted": _emitted,
            "own kB": lambda engine: f"{engine.private_bytes / 1e3:.1f}",
            "GFLOPs": lambda engine: f"{engine.flops / 1e9:.3f}",
            "predicted ms": lambda engine: _latency_cells(engine, latencies)[0],
            "measured ms": lambda engine: _latency_cells(engine, latencies)[1],
            "parity max abs": lambda engine: max_abs(engine.parity.outputs if engine.parity else ()),
            "parity cosine": lambda engine: min_cosine(engine.parity.outputs if engine.parity else ()),
        },
    )


def max_abs(compared: Iterable[ParityOutput | PlanParity]) -> str:
    """The worst of ``compared``, a dash where there is none."""
    return "-" if (worst := max((one.max_abs for one in compared), default=None)) is None else f"{worst:.1e}"


def min_cosine(compared: Iterable[ParityOutput | PlanParity]) -> str:
    """As ``max_abs``."""
    return "-" if (worst := min((one.min_cosine for one in compared), default=None)) is None else f"{worst:.7f}"


def stage_table(build: BuildRecord) -> Table:
    """One row a stage of the compile: what it took on the wall and of the processor."""
    cpu = build.cpu_seconds
    stages = [*build.seconds.items(), *([("all", sum(build.seconds.values()))] if cpu else [])]
    cpu = {**cpu, "all": sum(cpu.values())}
    return Table.of(
        stages,
        {
            "stage": lambda stage: stage[0],
            "seconds": lambda stage: f"{stage[1]:.1f}",
            "CPU seconds": lambda stage: f"{cpu[stage[0]]:.1f}" if stage[0] in cpu else "-",
        },
    )


def describe_axes(axes: Iterable[Axis]) -> str:
    """``6 x ffn 1536, 1 x moe.capacity_factor 100 %``, or ``none``."""
    sizes: dict[tuple[str, int], int] = {}
    for axis in axes:
        sizes[axis.kind, axis.size] = sizes.get((axis.kind, axis.size), 0) + 1
    return ", ".join(f"{n} x {kind} {size}{_AXIS_UNITS.get(kind, '')}" for (kind, size), n in sizes.items()) or "none"


def common_details(manifest: Manifest) -> dict[str, str]:
    """Metadata and variants that are the same in every whole engine, by name."""
    wholes = [_details(engine) for engine in manifest.engines if engine.segment is None]
    return {name: value for name, value in wholes[0].items() if all(other.get(name) == value for other in wholes)}


def detail_tables(manifest: Manifest) -> dict[str, Table]:
    """By heading, the tables that have rows: metadata and variants that differ between engines, routes, and texts
    beside the library that the model's folder is of."""
    tables = {
        "Metadata and variants": _metadata_table(manifest),
        "Routing": _routing_table(manifest),
        "Texts": _text_table(manifest),
    }
    return {heading: table for heading, table in tables.items() if table.rows}


@dataclass(frozen=True)
class CacheSize:
    """``bytes`` of the keys and values, and the states, of one row with room for ``tokens``."""

    tokens: int
    bytes: int


def cache_sizes(
    layers: Sequence[CachedLayer], positions: int, longest_run: int, states: Sequence[Sequence[int]] = ()
) -> tuple[CacheSize, ...]:
    """At a common capacity and at the largest."""
    capacities = sorted({min(_TOKENS, positions), positions})
    return tuple(CacheSize(tokens, cache_bytes(layers, 1, tokens, longest_run, states)) for tokens in capacities)


def sizes_at(layers: Sequence[CachedLayer], capacities: Iterable[int]) -> tuple[CacheSize, ...]:
    """At capacities that are static, where every layer has so many places."""
    return tuple(CacheSize(tokens, cache_bytes(layers, 1, tokens, tokens)) for tokens in sorted(set(capacities)))


def sizes_of(entry: GenerationEntry | None) -> tuple[CacheSize, ...]:
    """Cache sizes of a bundle; none where it does not generate."""
    if entry is None:
        return ()
    if capacities := [engine.capacity for engine in entry.engines if engine.capacity is not None]:
        return sizes_at(entry.layers, capacities)
    return cache_sizes(entry.layers, entry.positions, entry.windowed_run, entry.states)


def cache_facts(sizes: Sequence[CacheSize]) -> list[tuple[str, str]]:
    """Name and value; nothing for no ``sizes``."""
    each = ", ".join(f"{size.bytes / 1e6:.1f} MB of {size.tokens} tokens" for size in sizes)
    return [("cache of a row", each)] if sizes else []


def _budget_at(manifest: Manifest) -> Bucket | None:
    """The shape at which the profile wanted budgets to be judged, as far as the manifest says so."""
    with contextlib.suppress(ValueError):
        return Bucket.parse(str(manifest.provenance.profile.get("budget_at")))
    return None


def _at(latency: Latency, shape: Bucket) -> LatencyPoint:
    """Latency of an engine at the one of its shapes that comes nearest to ``shape``."""

    def distance(point: LatencyPoint) -> float:
        return abs(log(point.batch / shape.batch)) + abs(log(point.sequence / shape.sequence))

    return min(latency.points, key=distance)


def _size(latencies: Mapping[str, LatencyPoint], engines: Iterable[EngineEntry]) -> Bucket | None:
    """Where the shown latencies of ``engines`` of ranges hold, which may lie beside the shape that was requested."""
    shown = (latencies.get(engine.id) for engine in engines if not engine.bucket.is_static)
    return next((Bucket(one.batch, one.sequence) for one in shown if one is not None), None)


def _exit_facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    if manifest.exits is None:
        return
    layers = ", ".join(str(segment.layer) for segment in manifest.exits.segments)
    gate = manifest.exits.gate
    own = f"entropy {gate.compare} {', '.join(f'{t:g}' for t in gate.thresholds)}" if gate else "no gate of its own"
    yield "exits", f"after layers {layers}, {manifest.exits.classes} classes; {own}"


def _proof_facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Per suite: on how many subjects, how many comparisons, and what was left out."""
    for suite in dict.fromkeys(proof.suite for proof in manifest.proofs):
        proofs = [proof for proof in manifest.proofs if proof.suite == suite]
        worst = max(proof.worst for proof in proofs)
        ties = sum(len(proof.near_ties) for proof in proofs)
        left_out = f", {ties} near ties left out" if ties else ""
        checked = sum(proof.checked for proof in proofs)
        yield f"proof of {suite}", f"{len(proofs)} subjects, {checked} comparisons, worst {worst:.1e}{left_out}"


def _ranking(manifest: Manifest) -> str:
    ranking = manifest.ranking
    if ranking.method == "none":
        return "as stored; the model was trained nested" if manifest.trained_nested else "as stored"
    return f"ranked by {ranking.method}" + (f" on {ranking.samples} samples" if ranking.samples else "")


def _emitted(engine: EngineEntry) -> str:
    """How the engine came about, and in short why it could not be sliced."""
    return textwrap.shorten(": ".join(filter(None, [engine.emitted, engine.slice_problem])), 60, placeholder="...")


def _quality_cell(quality: Quality | None, name: str) -> str:
    return cell(quality.figures, name, quality.errors) if quality else "-"


def _latency_cells(engine: EngineEntry | None, latencies: Mapping[str, LatencyPoint]) -> tuple[str, str]:
    """Predicted and measured p50, or dashes: neither replaces the other. A noisy one is marked."""
    latency = latencies.get(engine.id) if engine else None
    if latency is None:
        return "-", "-"
    measured, mark = latency.measured_p50_ms, " noisy" if is_noisy(latency.noise) else ""
    return f"{latency.predicted_ms:.2f}", "-" if measured is None else f"{measured:.2f}{mark}"


def _metadata_table(manifest: Manifest) -> Table:
    """One row an engine, one column what not all engines share."""
    common = common_details(manifest)
    short = ShortNames.of(manifest)
    details = {short(engine.id): _details(engine) for engine in manifest.engines}
    names = [name for name in _names(details.values()) if name not in common]
    rows = [[engine, *(own.get(name, "-") for name in names)] for engine, own in details.items() if own and names]
    return Table(["engine", *names], rows)


def _routing_table(manifest: Manifest) -> Table:
    """One row a tensor of routes: the choices that its parity cases made, and how PyTorch judged them."""
    short = ShortNames.of(manifest)
    judged = [
        (short(engine.id), routes)
        for engine in manifest.engines
        for routes in (engine.parity.routing if engine.parity else None) or ()
    ]

    def share(name: str) -> Callable[[tuple[str, ParityRouting]], str]:
        return lambda row: f"{100 * row[1].shares[name]:.2f}" if name in row[1].shares else "-"

    return Table.of(
        judged,
        {
            "engine": lambda row: row[0],
            "routes": lambda row: row[1].name,
            "choices": lambda row: row[1].made,
            "not PyTorch's own": lambda row: row[1].differing,
            "worst score gap": lambda row: f"{row[1].worst_score_gap:.1e}",
            **{f"{name.replace('_', ' ')} %": share(name) for name in _names(routes.shares for _, routes in judged)},
        },
    )


def _text_table(manifest: Manifest) -> Table:
    """One row an embedding of each receipt of texts."""
    short = ShortNames.of(manifest)
    return Table.of(
        [(receipt, output) for receipt in manifest.texts for output in receipt.outputs],
        {
            "texts of": lambda row: f"{short(row[0].submodel)}, {row[1].name}",
            "beside": lambda row: row[0].library,
            "through": lambda row: ", ".join(row[0].stages),
            "cases": lambda row: len(row[0].cases),
            "parity max abs": lambda row: max_abs([row[1]]),
            "parity cosine": lambda row: min_cosine([row[1]]),
        },
    )


def _details(engine: EngineEntry) -> dict[str, str]:
    stated = {**(engine.metadata or {}), **(engine.variants or {})}
    return {f"{name} ({_UNITS[name]})" if name in _UNITS else name: str(value) for name, value in stated.items()}


def _names(tables: Iterable[Mapping[str, object]]) -> list[str]:
    """Every key, in the order of first use."""
    return list(dict.fromkeys(name for table in tables for name in table))
