"""Bundles as one self-contained HTML page: no other file, no network: the facts and tables that ``inspect`` prints,
with a picture of quality over latency and memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from string import Template

from ..bundle.figures import meanings, present
from ..bundle.open_bundle import Bundle
from ..runtime.exits.policy import Calibration
from ..runtime.summary import ShortNames, detail_tables, engine_table, stage_table, submodel_table
from ..tables import Table
from .bundle_view import bundle_warnings, files_table, here_facts, measured_build
from .console import in_options

# Columns of the table of submodels, which the picture shows.
_PARAMETERS, _WEIGHTS, _PREDICTED, _MEASURED, _FIRST_FIGURE = 1, 2, 3, 4, 5
_COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 460, 300, 62, 46, 16


@dataclass(frozen=True)
class _Point:
    """A submodel at ``x`` and ``y``; ``budgets`` are those that chose it."""

    label: str
    x: float
    y: float
    budgets: str


def render(bundles: Sequence[Bundle]) -> str:
    """The page on ``bundles``: pictures of all, what tells them apart, and a section for each."""
    names = _names(bundles)
    tables = {name: submodel_table(one.manifest, measured_build(one)) for name, one in names.items()}
    sections = [_pictures(tables)]
    if len(names) > 1:
        sections.append(f"<h2>Compared</h2>{_compared({name: _facts(one) for name, one in names.items()})}")
    sections += [_section(name, one, tables[name], len(names) == 1) for name, one in names.items()]
    return Template(_PAGE).substitute(title=escape(", ".join(names)), body="\n".join(sections))


def _names(bundles: Sequence[Bundle]) -> dict[str, Bundle]:
    """By what each is called here: its folder, or its whole path where two folders have one name."""
    folders = [one.path.name for one in bundles]
    return {
        str(one.path) if folders.count(folder) > 1 else folder: one
        for one, folder in zip(bundles, folders, strict=True)
    }


def _facts(bundle: Bundle) -> list[tuple[str, str]]:
    versions = sorted(bundle.manifest.provenance.tools.items())
    host = {key: str(value) for key, value in bundle.build.host.items()}
    return [
        *((name, in_options(value)) for name, value in here_facts(bundle) if name != "warning"),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions)),
        ("compiled on", ", ".join(f"{key} {value}" for key, value in host.items())),
    ]


def _section(name: str, bundle: Bundle, submodels: Table, has_facts: bool) -> str:
    manifest, build = bundle.manifest, measured_build(bundle)
    parts = [] if has_facts else [f"<h2>{escape(name)}</h2>"]
    parts += [f'<p class="warning">{escape(in_options(warning))}</p>' for warning in bundle_warnings(bundle)]
    if has_facts:
        parts.append(_table(Table.facts(_facts(bundle)), "facts"))
    measured = [entry.quality for entry in manifest.submodels if entry.quality]
    meant = meanings(present(quality.figures for quality in measured))
    parts += ["<h3>Submodels</h3>", _table(submodels), *(f"<p>{escape(line)}</p>" for line in meant)]
    parts.append(_table(ShortNames.of(manifest).ids))
    tables = {"Engines and their parity": engine_table(manifest, build), **detail_tables(manifest)}
    short = ShortNames.of(manifest)
    if (calibration := Calibration.read(bundle)) is not None:
        tables["Calibrated exits"] = Table.of(
            calibration.policies,
            {
                "submodel": lambda one: short(one.submodel),
                "policy": lambda one: one.name,
                "budget": lambda one: one.budget,
                "thresholds": lambda one: ", ".join(f"{threshold:.4g}" for threshold in one.thresholds),
                "rows left at each exit": lambda one: ", ".join(map(str, one.histogram)),
                "quality": lambda one: f"{one.measured.quality:.4f}",
                "ms": lambda one: f"{one.measured.costs.p50_latency_ms:.2f}",
                "ms whole": lambda one: f"{one.whole.costs.p50_latency_ms:.2f}",
            },
        )
    tables |= {"Compile": stage_table(build), "Files": files_table(bundle)}
    parts += [f"<h3>{escape(heading)}</h3>{_table(table)}" for heading, table in tables.items()]
    return f"<section>{''.join(parts)}</section>"


def _table(table: Table, kind: str = "sortable") -> str:
    heads = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = [
        f"<tr{' class=chosen' if number in table.chosen else ''}>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>"
        for number, row in enumerate(table.rows)
    ]
    head = f"<thead><tr>{heads}</tr></thead>" if any(table.columns) else ""
    return f'<div class="wide"><table class="{kind}">{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _compared(facts: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """A row a fact, a column a bundle; rows that differ are marked."""
    by_name = {bundle: _lines(pairs) for bundle, pairs in facts.items()}
    rows = [
        [fact, *(lines.get(fact, "-") for lines in by_name.values())]
        for fact in dict.fromkeys(fact for lines in by_name.values() for fact in lines)
    ]
    different = [number for number, (_, *values) in enumerate(rows) if len(set(values)) > 1]
    return _table(Table(["", *facts], rows, different), "facts")


def _lines(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    lines: dict[str, str] = {}
    for fact, value in pairs:
        lines[fact] = f"{lines[fact]}; {value}" if fact in lines else value
    return lines


def _pictures(tables: Mapping[str, Table]) -> str:
    """Quality over latency, and over the bytes of weights; where none was measured, parameters are in its place."""
    has_quality = all(table.columns[_FIRST_FIGURE] != "budgets" for table in tables.values())
    y = _FIRST_FIGURE if has_quality and len({table.columns[_FIRST_FIGURE] for table in tables.values()}) == 1 else None
    first = next(iter(tables.values()))
    what = first.columns[y if y is not None else _PARAMETERS]
    is_measured = all(row[_MEASURED] != "-" for table in tables.values() for row in table.rows)
    x = _MEASURED if is_measured else _PREDICTED
    pictures = "".join(
        _picture({name: list(_points(table, column, y or _PARAMETERS)) for name, table in tables.items()}, title, what)
        for column, title in ((x, first.columns[x]), (_WEIGHTS, first.columns[_WEIGHTS]))
    )
    keys = "".join(
        f'<li><span style="background:{_colour(number)}"></span>{escape(name)}</li>'
        for number, name in enumerate(tables)
    )
    note = "A ring: a budget chose it. The line joins submodels that none is better than in both."
    lacking = "" if y is not None else " Quality was not measured, so that size stands in its place."
    return f'<figure>{pictures}<figcaption><ul class="keys">{keys}</ul>{note}{lacking}</figcaption></figure>'


def _points(table: Table, x: int, y: int) -> Iterator[_Point]:
    for row in table.rows:
        if "-" not in (row[x], row[y]):
            yield _Point(row[0], float(row[x].split()[0]), float(row[y].split()[0]), row[-1].replace("-", ""))


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _best(points: Sequence[_Point]) -> list[_Point]:
    """Those that no other is at least as good as, from the cheapest on."""
    found: list[_Point] = []
    for point in sorted(points, key=lambda one: (one.x, -one.y)):
        if not found or point.y > found[-1].y:
            found.append(point)
    return found


def _picture(series: Mapping[str, Sequence[_Point]], x_title: str, y_title: str) -> str:
    every = [point for points in series.values() for point in points]
    if not every:
        return ""
    ups, rights = (
        _ticks(min(one.y for one in every), max(one.y for one in every)),
        _ticks(0, max(one.x for one in every)),
    )
    low, high, most = ups[0], ups[-1], rights[-1]

    def at(point: _Point) -> tuple[float, float]:
        across = _LEFT + point.x / most * (_WIDTH - _LEFT - 12)
        return across, _TOP + (high - point.y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = list(_axes(ups, rights, x_title, y_title))
    for number, points in enumerate(series.values()):
        colour, line = _colour(number), " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, _best(points)))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-opacity=".5"/>')
        for point in points:
            x, y = at(point)
            said = f"{point.label}: {x_title} {point.x:g}, {y_title} {point.y:g}"
            said += f"; budgets {point.budgets}" if point.budgets else ""
            ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="none" stroke="{colour}"/>' if point.budgets else ""
            parts.append(
                f'<g><title>{escape(said)}</title>{ring}<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>'
                f'<text x="{x:.1f}" y="{y - 11:.1f}" text-anchor="middle">{escape(point.label)}</text></g>'
            )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from below ``low`` to above ``high``, some four steps."""
    rough = (high - low) / 4 or abs(high) / 4 or 1.0
    unit = 10 ** floor(log10(rough))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
    first, last = floor(low / step - 1e-9), ceil(high / step + 1e-9)
    return [step * number for number in range(max(first, 0) if low >= 0 else first, last + 1)]


def _axes(ups: Sequence[float], rights: Sequence[float], x_title: str, y_title: str) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - 12
    for value in ups:
        y = bottom - (value - ups[0]) / (ups[-1] - ups[0]) * (bottom - _TOP)
        yield f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.6g}</text>'
    for value in rights:
        x = _LEFT + value / rights[-1] * (right - _LEFT)
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:.6g}</text>'
    yield f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_title)}</text>'
    middle = (_TOP + bottom) / 2
    yield f'<text transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { color-scheme: light dark; --text: #1f2937; --back: #fff; --line: #e5e7eb; --mark: #eff6ff; --warn: #fffbeb }
@media (prefers-color-scheme: dark) {
  :root { --text: #e5e7eb; --back: #111827; --line: #374151; --mark: #1e3a5f; --warn: #422f0b }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 0 auto; padding: 1rem;
  max-width: 75rem }
h1 { font-size: 1.5rem; overflow-wrap: anywhere } h2 { margin-top: 2.5rem; overflow-wrap: anywhere }
figure { margin: 0 } svg { width: 100%; max-width: 36rem; font-size: 11px }
svg text { fill: var(--text) } .grid { stroke: var(--line) }
@media (min-width: 60rem) { svg { width: 49% } }
.keys { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 1rem; margin: .25rem 0 }
.keys span { display: inline-block; width: .7rem; height: .7rem; border-radius: 50%; margin-right: .4rem }
.wide { overflow-x: auto; margin: .5rem 0 } table { border-collapse: collapse }
td, th { padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
.sortable td, .sortable th { white-space: nowrap } .sortable th { cursor: pointer }
.sortable th::after { content: " \\2195"; opacity: .4 } .facts td:first-child { white-space: nowrap; font-weight: 600 }
.facts td { overflow-wrap: anywhere; min-width: 8rem } .chosen { background: var(--mark) }
.warning { background: var(--warn); border-left: 4px solid #d97706; padding: .5rem 1rem }
</style></head><body>
<h1>$title</h1>
$body
<script>
for (const head of document.querySelectorAll(".sortable th")) head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0], at = head.cellIndex, down = head.dataset.down === "1";
  head.dataset.down = down ? "" : "1";
  const key = row => { const text = row.cells[at].textContent, number = parseFloat(text.replaceAll(",", ""));
    return isNaN(number) ? text : number };
  const order = (a, b) => typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
  body.append(...[...body.rows].sort((a, b) => order(key(a), key(b)) * (down ? -1 : 1)));
});
</script>
</body></html>
"""
