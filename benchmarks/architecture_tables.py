"""What became of classes of transformers that were tried, as results in a file and as the tables of
docs/architectures.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from ..exporters.checkpoints.config import offline_transformers
from .transformers_classes import classes_of

_ROOT = Path(__file__).parents[1]
FOUND = _ROOT / "build" / "zoo.jsonl"
_PAGE = _ROOT / "docs" / "architectures.md"
# Results of classes that compile and pass the gate.
PASSING = ("range", "row", "length", "batch")
Found = dict[str, str]


def read_found(file: Path = FOUND) -> dict[str, Found]:
    """The latest result of each class in ``file``, by ``TYPE/CLASS``."""
    lines = file.read_text().splitlines() if file.is_file() else []
    latest = {f"{found['type']}/{found['class']}": number for number, found in enumerate(map(json.loads, lines))}
    return {key: json.loads(lines[number]) for key, number in sorted(latest.items(), key=lambda item: item[1])}


def write_tables(found: Mapping[str, Found], classes: Iterable[str], pairs: Sequence[tuple[str, str]]) -> None:
    """Writes the table of ``pairs`` if there are some, else those of the ``classes`` that types are tried by."""
    title = _title(found)
    if pairs:
        _write("zoo pairs", pairs_table(found, pairs, title))
    else:
        _write("zoo", main_tables(found, classes, title))


def main_tables(found: Mapping[str, Found], classes: Iterable[str], title: str) -> list[str]:
    """What became of the ``classes`` that types are tried by, in Markdown."""
    classes = sorted(classes)
    ones = {key: found[key] for key in classes if key in found}
    by_result: dict[str, list[str]] = {}
    for key, one in ones.items():
        by_result.setdefault(_kind(one), []).append(key)
    lines = [
        f"{title}: {len(ones)} of {len(classes)} types tried. No small model could be made of "
        f"{len(by_result.get('no small model', ()))}, and PyTorch itself does not run "
        f"{len(by_result.get('not run', ()))} others with what could be given to them.",
        *("", "| what | of those tried |", "|---|---|"),
        *(f"| {what} | {share} |" for what, share in _rates(ones.values()).items()),
        *("", "| result | types | |", "|---|---|---|"),
    ]
    for kind, said in {
        "range": "any length in one engine",
        "row": "any length, of one row: what fills a row changes answers (`--bucket 1x1..40`)",
        "length": "three lengths, an engine each (`--bucket 2x33`)",
        "batch": "inputs of one size, any batch",
    }.items():
        lines.append(f"| {said} | {len(by_result.get(kind, ()))} | {_listed(by_result.get(kind, ()))} |")
    lines += ["", "| type that compiles and does not generate | reason |", "|---|---|"]
    for one in ones.values():
        if one["result"] in PASSING and one.get("generates", "tokens") != "tokens":
            lines.append(f"| `{one['type']}` | `{_short(one['generates'])}` |")
    lines += ["", "| type | refused by | reason |", "|---|---|---|"]
    for kind, said in {"refused": "", "time": "", "not run": "PyTorch: ", "no small model": ""}.items():
        for key in by_result.get(kind, ()):
            one = ones[key]
            stage = one["result"] if kind == "refused" else kind
            reason = f"{said}{one['torch'] if said and 'torch' in one else one['reason']}"
            lines.append(f"| `{one['type']}` | {stage} | `{_short(reason)}` |")
    return lines


def _kind(one: Found) -> str:
    """A result of ``PASSING``, ``refused``, ``time``, ``not run`` (nor by PyTorch itself) or ``no small model``."""
    kind = one["result"]
    if kind in (*PASSING, "no small model"):
        return kind
    return "refused" if one.get("torch") == "" else "time" if kind == "time" else "not run"


def _rates(ones: Collection[Found]) -> dict[str, str]:
    """What of ``ones`` compiles, what was found and what generates, by its line of the table."""
    count = Counter(map(_kind, ones))
    passing = sum(count[kind] for kind in PASSING)
    read = [one for one in ones if "axes" in one]
    writing = [one for one in ones if "generates" in one and one["result"] in PASSING]

    def having(kind: str) -> str:
        of = [one for one in read if kind in one["states"].split()]
        if kind == "ffn":
            of = [one for one in of if "experts" not in one["states"].split()]
        return rate(sum(kind in one["axes"].split() for one in of), len(of))

    return {
        "compile and pass, of those that PyTorch runs": rate(passing, passing + count["refused"] + count["time"]),
        "of all of which a small model could be made": rate(passing, len(ones) - count["no small model"]),
        "FFN found, of those read that state one and no experts": having("ffn"),
        "heads found, of those read that state some": having("heads"),
        "write what transformers' `generate` writes, of classes that write and compile": rate(
            sum(one["generates"] == "tokens" for one in writing), len(writing)
        ),
    }


def pairs_table(found: Mapping[str, Found], pairs: Sequence[tuple[str, str]], title: str) -> list[str]:
    """Which pairs of type and task compile, in Markdown."""
    named = {pair: name for pair in pairs if (name := classes_of(*pair)) is not None}
    tried = {pair: found[key] for pair, name in named.items() if (key := f"{pair[0]}/{name}") in found}
    passing = {pair for pair, one in tried.items() if one["result"] in PASSING}
    by_task: dict[str, list[bool]] = {}
    for pair in tried:
        by_task.setdefault(pair[1], []).append(pair in passing)
    share = len(passing) / max(1, len(tried)) * len(named) / max(1, len(pairs))
    lines = [
        f"{title}: {len(pairs)} pairs of type and task whose type transformers has, {len(pairs) - len(named)} of them "
        f"without a class any more. Of the others {len(tried)} were tried, in an order at random: "
        f"{rate(len(passing), len(tried))} compile and pass the gate; with pairs without a class as refused "
        f"{100 * share:.0f} %.",
        *("", "| task | compile |", "|---|---|"),
        *(f"| {task} | {rate(sum(some), len(some))} |" for task, some in sorted(by_task.items())),
        *("", "| type | task | refused by | reason |", "|---|---|---|---|"),
    ]
    for (kind, task), one in sorted(tried.items()):
        if one["result"] not in PASSING:
            lines.append(f"| `{kind}` | {task} | {one['result']} | `{_short(one['reason'])}` |")
    return lines


def rate(some: int, every: int) -> str:
    return f"{some} of {every}" + (f", {100 * some / every:.0f} %" if every else "")


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key.partition('/')[0]}`" for key in keys)


def _short(reason: str) -> str:
    return reason[:160].replace("|", "\\|").replace("`", "'")


def _write(part: str, lines: Sequence[str]) -> None:
    """Puts ``lines`` in the place of what the page has for ``part``."""
    before, _, rest = _PAGE.read_text().partition(f"<!-- {part} -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    text = "\n".join(lines)
    _PAGE.write_text(f"{before}<!-- {part} -->\n{text}\n{end}{after}")


def _title(found: Mapping[str, Found]) -> str:
    latest = list(found.values())[-1]["code"] if found else ""
    older = sum(one["code"] != latest for one in found.values())
    said = f" ({older} of {len(found)} classes by earlier versions of the code)" if older else ""
    return f"transformers {offline_transformers().__version__}{said}"
