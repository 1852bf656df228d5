"""The commands as Python functions, contents of a wheel, and packages of a fresh clone."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nestforge
import pytest
import tomllib
from nestforge.tools import functions

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
TEXTS = ["a fox", "the dog", "a fox and a dog", "the lazy dog", "the fox is lazy"]


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    """A bundle with an embedding, a tokenizer and two submodels."""
    return Path(shutil.copytree(GOLDEN / "bundle-texts", tmp_path / "encoder.bundle"))


def test_every_function_is_a_public_name() -> None:
    own = {name for name, (module, _) in nestforge._HOMES.items() if module == "tools.functions"}
    assert own == {"calibrate", "calibrate_drafts", "measure", "search"}
    assert all(getattr(nestforge, name) is getattr(functions, name) for name in own)


def test_an_index_and_searches_in_it(encoder: Path, tmp_path: Path) -> None:
    built = nestforge.index(encoder, TEXTS)
    built.save(tmp_path / "corpus.index")
    found = nestforge.search(encoder, tmp_path / "corpus.index", TEXTS, k=2)
    assert found.ids[:, 0].tolist() == [0, 1, 2, 3, 4]
    with nestforge.load(encoder) as model:
        assert nestforge.search(model, built, TEXTS[0], k=1, submodel="50%").ids.shape == (1, 1)
        table = nestforge.compare(model, built, TEXTS, k=2)
        assert len(table.submodels) == 2
        assert model(TEXTS[0]).submodel == found.submodel, "the model is still open"
    assert table.submodels[0].recall_at_k == 1.0


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no shape": (lambda b: nestforge.bench(b, at="1y8"), "at: "),
    "no path": (lambda b: nestforge.measure(5), "bundle: expected "),
    "a text for texts": (lambda b: nestforge.bench_requests(b, texts="a"), "texts: expected a list of str or None"),
    "no text": (lambda b: nestforge.consistency(b, text=5), "text: expected "),
    "no data": (lambda b: nestforge.calibrate(b, 5, "loss<=1"), "data: expected "),
    "no labels": (lambda b: nestforge.index(b, TEXTS, labels=5), "labels: expected "),
    "no index": (lambda b: nestforge.search(b, 5, TEXTS), "index: expected "),
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments_of_another_type_are_one_line(case: str, encoder: Path) -> None:
    call, says = WRONG[case]
    with pytest.raises(nestforge.InputError) as failure:
        call(encoder)
    assert str(failure.value).startswith(says)
    assert "\n" not in str(failure.value)


def test_consistency_of_texts_in_a_list_and_in_a_file(encoder: Path, tmp_path: Path) -> None:
    texts = [f"{'a ' * n}fox" for n in range(1, 25)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    listed = nestforge.consistency(encoder, text=texts)
    assert listed == nestforge.consistency(encoder, text=tmp_path / "texts.txt")
    assert repr(listed).startswith(f"Consistency({encoder}: 2 submodels, ")
    assert "<td>ffn16-heads1</td>" in listed._repr_html_()
    with pytest.raises(nestforge.InputError, match="text: expected str, PathLike, a list of str or None, got list"):
        nestforge.consistency(encoder, text=["a", 3])
    with pytest.raises(nestforge.InputError, match=r"^text: 1 different texts, one per line; expected at least 20"):
        nestforge.consistency(encoder, text=["a"])


ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed_and_nothing_else() -> None:
    outside = {"tests", "docs", "build", "dist", "demo", "examples", "benchmarks"}
    inside = [top for top in ROOT.iterdir() if top.is_dir() and top.name not in outside and top.name[0] != "."]
    folders = {Path()} | {path.parent.relative_to(ROOT) for top in inside for path in top.rglob("*.py")}
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").exists()] == []
    names = {".".join(("nestforge", *folder.parts)) for folder in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == names


def test_constraints_pin_every_requirement_exactly_and_name_no_local_build() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pins = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines}
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line) for line in lines)
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["cpu"], *extras["compile"], *extras["dev"]]
    names = {re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", text)[0]).lower() for text in wanted}
    assert names <= pins


def test_continuous_integration_runs_exactly_make_test() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert [line for line in script.splitlines() if line.startswith(("exec", "make"))] == ["exec make test"]
