"""The page about bundles: whole, self-contained, and looked at in a browser where there is one."""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bundle.open_bundle import open_bundle
from nestforge.runtime.summary import submodel_table
from nestforge.tools.bundle_view import measured_build
from nestforge.tools.html_report import _best, _Point, _ticks, render
from support.commands import nestforge


class _Page(HTMLParser):
    """Elements of a page, whose tags must close each other in order."""

    VOID = ("meta", "line", "circle", "polyline")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.attributes: list[tuple[str, str | None]] = []
        self.said: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def test_a_page_has_every_submodel_engine_and_file_and_needs_no_other(tiny_bundle: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    text = render([bundle])
    page = _Page(text)
    assert page.open == []
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    assert "http://" not in text
    assert "https://" not in text
    table = submodel_table(bundle.manifest, measured_build(bundle))
    for said in (*(cell for row in table.rows for cell in row), *(entry.path for entry in bundle.manifest.files)):
        assert said in page.said
    assert page.counts["svg"] == 2
    assert page.counts["title"] == 1 + 2 * len(table.rows), "a point of each submodel in both pictures"


def test_bundles_are_compared_and_what_differs_is_marked(tiny_bundle: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    other = replace(bundle, path=bundle.path.parent / "other", manifest=replace(bundle.manifest, name="another"))
    page = render([bundle, other])
    marked = page.split("<h2>Compared</h2>")[1].split("</table>")[0].split("<tr class=chosen>")[1:]
    assert [row.split("</td>")[0] for row in marked] == ["<td>model"]
    assert page.count("<section>") == 2
    twice = replace(bundle, path=bundle.path.parent / "elsewhere" / bundle.path.name)
    assert str(twice.path) in render([bundle, twice]), "two folders of one name are told apart by their paths"


def test_nothing_that_comes_from_a_bundle_is_markup(tiny_bundle: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    named = replace(bundle.manifest, name="<script>alert(1)</script>", notes=('"><img src=x onerror=alert(2)>',))
    page = render([replace(bundle, manifest=named, path=bundle.path.parent / "<b>.bundle")])
    assert _Page(page).counts["script"] == 1
    assert "img" not in _Page(page).counts
    assert "b" not in _Page(page).counts


def test_the_line_joins_those_that_none_is_better_than() -> None:
    points = [
        _Point("slow", 9, 0.9, ""),
        _Point("good", 5, 0.95, ""),
        _Point("small", 1, 0.5, ""),
        _Point("no", 2, 0.4, ""),
    ]
    assert [point.label for point in _best(points)] == ["small", "good"]


@given(st.floats(0, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_round_and_hold_what_they_are_of(low: float, more: float) -> None:
    ticks = _ticks(low, low + more)
    assert ticks[0] <= low + 1e-6 * more
    assert ticks[-1] >= low + more
    assert 2 <= len(ticks) <= 8


def test_the_command_writes_one_file_and_replaces_none(tiny_bundle: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert nestforge("report", tiny_bundle, "--html", page).output == f"wrote {page}\n"
    before = page.read_text()
    again = nestforge("report", tiny_bundle, "--html", page)
    assert (again.exit_code, "exists" in again.output) == (1, True)
    assert page.read_text() == before


_BROWSER = """
import sys
from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

app = QApplication([])
view = QWebEngineView()
view.resize(int(sys.argv[2]), 900)
asked = '''
const head = document.querySelectorAll(".sortable th")[1], column = () => [...head.closest("table").tBodies[0].rows]
  .map(row => parseFloat(row.cells[1].textContent));
head.click(); const up = column(); head.click(); const down = column();
[matchMedia("(prefers-color-scheme: dark)").matches, getComputedStyle(document.body).backgroundColor,
 document.documentElement.scrollWidth <= innerWidth, up.join(","), down.join(",")].join("|")'''
view.loadFinished.connect(lambda _: QTimer.singleShot(500, lambda: view.page().runJavaScript(
    asked, lambda said: (print(said, flush=True), app.quit()))))
view.load(QUrl.fromLocalFile(sys.argv[1]))
view.show()
QTimer.singleShot(60000, app.quit)
app.exec()
"""


@pytest.mark.skipif(importlib.util.find_spec("PySide6") is None, reason="needs a browser, Qt WebEngine of PySide6")
@pytest.mark.parametrize(("width", "is_dark"), [(1200, False), (400, True)])
def test_a_browser_shows_it_light_and_dark_wide_and_narrow_and_sorts(
    tiny_bundle: Path, tmp_path: Path, width: int, is_dark: bool
) -> None:
    page = tmp_path / "page.html"
    page.write_text(render([open_bundle(tiny_bundle)]))
    flags = "--no-sandbox --disable-gpu" + (" --blink-settings=preferredColorScheme=0" if is_dark else "")
    env = {"PATH": "", "PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path), "QT_QPA_PLATFORM": "offscreen"}
    env |= {"QTWEBENGINE_CHROMIUM_FLAGS": flags, "QTWEBENGINE_DISABLE_SANDBOX": "1"}
    command = [sys.executable, "-c", _BROWSER, str(page), str(width)]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip().split("|")
    assert said[:3] == [str(is_dark).lower(), "rgb(17, 24, 39)" if is_dark else "rgb(255, 255, 255)", "true"]
    up, down = ([float(cell) for cell in column.split(",")] for column in said[3:])
    assert up == sorted(up) == down[::-1]
