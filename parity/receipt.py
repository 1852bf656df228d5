"""The result of a check as a file: a receipt in JSON that can be checked again, a page in HTML, a report in JUnit's
XML.

A receipt is ``{"format": 1, "report": ..., "versions": ..., "files": {path: {"bytes", "sha256"}}}``; ``report`` has the
fields of ``ParityReport``, null for numbers that are not finite. docs/tasks/check-an-export.md lists them.
"""

import json
import math
import platform
from contextlib import suppress
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..errors import InputError
from ..exporters.checkpoints.checkpoint import sha256_of
from ..outside import printable
from ..outside_file import read_file
from ..profiles.parity_request import SETTINGS, sha256_of_own
from ..progress import Progress, silent
from ..strict import finite, unstructure
from ..tables import as_html
from ..whole_file import write_whole
from .check import GraphReport, ParityReport, check_parity
from .verdict import COLUMNS

_FORMAT = 1
_MOST_BYTES = 2**26
_PACKAGES = ("nestforge", "torch", "transformers", "sentence-transformers", "onnx", "onnxruntime", "openvino", "numpy")
_WORST = 12  # rows of a page


def write(report: ParityReport, path: Path) -> None:
    """Writes the form that the suffix of ``path`` names: ``.json``, ``.html`` or ``.xml``. Raises InputError for
    another and where ``as_receipt`` does, OutputError."""
    forms = {".json": as_receipt, ".html": as_page, ".xml": as_junit}
    if path.suffix not in forms:
        raise InputError(f"{path}: expected a name that ends in {', '.join(forms)}")
    content = forms[path.suffix](report).encode()
    write_whole(path, lambda stream: stream.write(content), "what the check found")


def as_receipt(report: ParityReport) -> str:
    """Raises InputError for a check against a module in memory, which could not be made again."""
    if report.settings["module"]:
        raise InputError(
            "a check against a module in memory has no receipt, since no file holds it; save .html or .xml"
        )
    data = {
        "format": _FORMAT,
        "report": finite(unstructure(report)),
        "versions": {"python": platform.python_version(), **_versions()},
        "files": {file: _facts(Path(file)) for file in (*report.files, *report.model_files)},
    }
    return json.dumps(data, indent=2)


def recheck(path: Path, progress: Progress = silent, **own: Any) -> ParityReport:
    """The check of a receipt, made again on the same files with the same settings; the user's ``own`` ``inputs`` and
    ``texts`` are to be given again, where it had some.

    Raises InputError for a file that is no receipt, for files and inputs that have changed, and where the verdict is
    another.
    """
    try:
        data = json.loads(read_file(path, _MOST_BYTES, InputError))
        stated, files = data["report"], data["files"]
        settings = {name: stated["settings"][name] for name in (*SETTINGS, "inputs", "texts")}
        export, against, verdict = stated["export"], stated["against"], bool(stated["verdict"])
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']}")
        hashes = {file: facts["sha256"] for file, facts in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise InputError(f"{path}: is no receipt of `nestforge parity` ({failure})") from failure
    for file, expected in hashes.items():
        if not Path(file).is_file() or sha256_of(Path(file)) != expected:
            raise InputError(f"{path}: {file} is not the file of the receipt any more")
    for name in ("inputs", "texts"):
        if settings.pop(name) != sha256_of_own(own.get(name)):
            raise InputError(f"{path}: `{name}` are not those of the receipt; give the same ones again, or none")
    report = check_parity(export, against, **settings, **own, progress=progress)
    if report.is_right != verdict:
        raise InputError(f"{path}: claims {'parity' if verdict else 'a difference'}, which is not so: {report.line}")
    return report


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _facts(file: Path) -> dict[str, object]:
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}


def as_page(report: ParityReport) -> str:
    """One HTML page without scripts: the verdict, the worst cases, and of a wrong export the error by module."""
    parts = [f"<h1>{_text(report.line)}</h1>"]
    for graph in report.graphs:
        facts = [("kind", f"{graph.kind}, {graph.precision}"), ("rule", graph.rule), ("cases", len(graph.cases))]
        facts += [("fault", graph.fault)] if graph.fault else []
        wrong = [row for row in graph.rows if row[-1] != "right"]
        parts.append(as_html(graph.export, facts, COLUMNS, (wrong or graph.rows)[:_WORST]))
        parts.append(_picture(graph))
    style = "<style>body{font-family:sans-serif;margin:2em}td,th{padding:2px 8px;text-align:left}</style>"
    return f"<!doctype html><meta charset=utf-8><title>Parity</title>{style}{''.join(parts)}"


def _picture(graph: GraphReport) -> str:
    """Error by module as bars, on a logarithmic scale from 1e-8 to 1."""
    lines = []
    for name, error in graph.fault.errors if graph.fault is not None else ():
        bar = f"<meter min=-8 max=0 high=-4 optimum=-8 value={math.log10(min(max(error, 1e-8), 1.0)):.2f}></meter>"
        mark = "b" if graph.fault is not None and name == graph.fault.module else "span"
        lines.append(f"<tr><td><{mark}>{_text(name)}</{mark}></td><td>{bar}</td><td>{error:.2g}</td></tr>")
    title = "<h2>Error by module, of the size of its value</h2>"
    return f"{title}<table>{''.join(lines)}</table>" if lines else ""


def as_junit(report: ParityReport) -> str:
    """A test case for each output of each case."""
    suites = ElementTree.Element("testsuites")
    for graph in report.graphs:
        suite = ElementTree.SubElement(suites, "testsuite", name=_plain(graph.export))
        outcomes = [(f"{figure.output.name} on {figure.case}", figure.why) for figure in graph.figures]
        outcomes += graph.failures.items()
        for name, why in outcomes:
            case = ElementTree.SubElement(suite, "testcase", name=_plain(name), classname="nestforge.parity")
            if why is not None:
                message = _plain(f"{why}; {graph.fault}" if graph.fault else why)
                ElementTree.SubElement(case, "failure", message=message)
        suite.set("tests", str(len(outcomes)))
        suite.set("failures", str(sum(why is not None for _, why in outcomes)))
    return ElementTree.tostring(suites, encoding="unicode")


def _plain(text: str) -> str:
    return printable(text, 2000)


def _text(value: object) -> str:
    return escape(printable(str(value), 400))
