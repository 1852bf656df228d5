"""The pages of the site as a browser gets them: tables are tables, no markup is left over, links and images lead on."""

import re
from html.parser import HTMLParser
from pathlib import Path

import markdown
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
# Marks of a row, a rule, emphasis, code, a link, a heading or an item that did not become one.
LEFT_OVER = re.compile(r"^\s*\||\|\s*-|\*\*|`|\]\(|\n\s*(?:#+|[-*]|1\.) ", re.MULTILINE)
# The name of a file, or the number of a record, does not say where a link leads.
NO_NAME = re.compile(r"|\S*\.md(#\S*)?|\d+")
INLINE = {"a", "code", "strong", "em"}


class Page(HTMLParser):
    """The blocks of text without code, links with their texts, images, ids, and per table the cells of each row."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = [""]
        self.links: list[list[str]] = []
        self.images: list[dict[str, str | None]] = []
        self.ids: set[str | None] = set()
        self.tables: list[list[int]] = []
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id"))
        self._open.append(tag)
        if tag == "img":
            self.images.append(values)
        elif tag == "a":
            self.links.append([values["href"] or "", ""])
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append(0)
        elif tag in {"td", "th"}:
            self.tables[-1][-1] += 1
        self._new_block(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self._new_block(tag)

    def _new_block(self, tag: str) -> None:
        if tag not in INLINE:
            self.text.append("")

    def handle_data(self, data: str) -> None:
        if "code" not in self._open:
            self.text[-1] += data
        if "a" in self._open:
            self.links[-1][1] += data


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    """Every page, rendered by the library and the extensions that the site is built with."""
    configured = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = [entry if isinstance(entry, dict) else {entry: {}} for entry in configured["markdown_extensions"]]
    options = {name: given for entry in listed for name, given in entry.items()}
    renderer = markdown.Markdown(extensions=list(options), extension_configs=options)
    return {page: Page(renderer.reset().convert(page.read_text())) for page in PAGES}


def test_nothing_is_left_of_markup(pages: dict[Path, Page]) -> None:
    found = [(path.name, block[:80]) for path, page in pages.items() for block in page.text if LEFT_OVER.search(block)]
    assert not found


def test_tables_are_tables(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        written = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)]
        cells = [[len(re.findall(r"(?<!\\)\|", line)) - 1 for line in lines] for lines in written]
        # Beside its rows a table is written with one line of dashes.
        assert page.tables == [counts[1:] for counts in cells], path.relative_to(ROOT)


def test_links_have_names_and_lead_somewhere(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for target, name in page.links:
            assert not NO_NAME.fullmatch(name), f"{path.relative_to(ROOT)}: the link to {target} is called {name!r}"
            if re.match("https?:", target):
                continue
            file, _, anchor = target.partition("#")
            leads_to = (path.parent / file).resolve() if file else path
            assert leads_to.exists(), f"{path.relative_to(ROOT)} links to {target}"
            if anchor and "python-api" not in leads_to.name:
                assert anchor in pages[leads_to].ids, f"{path.relative_to(ROOT)} links to {target}"


def test_images_exist_and_say_what_they_show(pages: dict[Path, Page]) -> None:
    shown = {path: page.images for path, page in pages.items() if page.images}
    assert {DOCS / "index.md", ROOT / "README.md"} <= shown.keys()
    for path, images in shown.items():
        assert all(image["alt"] and (path.parent / str(image["src"])).is_file() for image in images), path


def test_every_page_is_on_the_site() -> None:
    listed = set(re.findall(r"\S+\.md$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    # Only the list of records is in the navigation.
    records = set(re.findall(r"\]\((\S+)\)", (DOCS / "decisions" / "README.md").read_text()))
    listed |= {f"decisions/{record}" for record in records}
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
