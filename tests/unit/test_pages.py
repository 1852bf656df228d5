"""The reference pages hold what the code says: ``make pages`` writes it."""

from __future__ import annotations

import re

import pytest
from nestforge import _HOMES
from nestforge.docs.pages import DOCS, PAGES, page


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_it_is_made(name: str) -> None:
    text = (DOCS / name).read_text()
    assert text.count("<!-- end -->") + text.count("<!-- fields ") > 1
    assert page(text) == text, "run `make pages`"


def test_a_field_that_came_or_went_changes_the_table() -> None:
    head = "<!-- fields bundle.manifest.BudgetEntry -->\n| field | type | meaning |\n|---|---|---|\n"
    made = page(f"{head}| `name`, `gone` | text | unique |\n\nAs it was.\n")
    assert "| `name` | text | unique |\n| `limits` | {`latency_ms`?, " in made
    assert made.endswith("| `reason` | text |  |\n\nAs it was.\n")


def test_everything_on_the_python_page_is_a_public_name() -> None:
    homes = {f"{module}.{name}" for module, name in _HOMES.values()} | {"runtime.retrieval.index.Index.build", "errors"}
    listed = re.findall(r"^::: nestforge\.(?!integrations\.)(\S+)", (DOCS / "python-api.md").read_text(), re.MULTILINE)
    assert len(listed) > 20
    assert set(listed) <= homes
