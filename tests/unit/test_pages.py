"""The reference pages and docs/bundle-format.md hold what the code says: ``make pages`` writes the pages."""

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from nestforge import _HOMES
from nestforge.bundle.build_record import BuildRecord
from nestforge.bundle.device_files.task_index import TaskIndex
from nestforge.bundle.entries.tensor_spec import DTYPES
from nestforge.bundle.manifest import SCHEMA_VERSION, Manifest
from nestforge.bundle.read_manifest import _PLAIN_NAME, MAX_JSON_BYTES, read_manifest
from nestforge.docs.pages import DOCS, PAGES, page
from nestforge.strict import unstructure


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


PAGE = (Path(__file__).parents[2] / "docs" / "bundle-format.md").read_text()


def dataclasses_below(cls: Any, found: set[Any]) -> set[Any]:
    """``cls`` and every dataclass among its fields' types."""
    found.add(cls)
    pending = list(typing.get_type_hints(cls).values())
    while pending:
        hint = pending.pop()
        pending += typing.get_args(hint)
        if dataclasses.is_dataclass(hint) and hint not in found:
            dataclasses_below(hint, found)
    return found


CLASSES = sorted(
    dataclasses_below(Manifest, set()) | dataclasses_below(BuildRecord, set()) | dataclasses_below(TaskIndex, set()),
    key=lambda cls: cls.__name__,
)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_is_on_the_page(cls: Any) -> None:
    keys = [field.name for field in dataclasses.fields(cls)]
    assert [key for key in keys if f"`{key}`" not in PAGE] == []


def test_the_limits_are_those_of_the_code() -> None:
    assert f"# Bundle format, schema {SCHEMA_VERSION}" in PAGE
    assert f"at most {MAX_JSON_BYTES:_} bytes".replace("_", " ") in PAGE
    assert f"`{_PLAIN_NAME.pattern}`" in PAGE
    assert all(f"`{dtype}`" in PAGE for dtype in DTYPES)


def test_the_example_is_a_manifest() -> None:
    (example,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert unstructure(read_manifest(example.encode(), "example")) == json.loads(example)


def test_the_example_of_views_adds_up() -> None:
    (header,) = re.findall(r"^(\{\"up.weight\".*?\}\}) ", PAGE, re.MULTILINE)
    begin, end = json.loads(header)["up.weight"]["data_offsets"]
    assert len(header) <= 70
    assert (8 + 70 + begin, end - begin, 8 + 70 + end) == (78, 32, 110)
