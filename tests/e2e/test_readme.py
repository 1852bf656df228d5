"""README.md, the first pages, the tutorial and the task pages are run: make targets exist, commands and Python work."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from nestforge.bucket import Bucket
from nestforge.compiler import nest
from nestforge.compiler.compile import compile_bundle
from nestforge.profiles import measure_rates
from nestforge.profiles.budget import BudgetSpec
from nestforge.profiles.load_profile import dump_profile, load_profile
from nestforge.tools import bundle_bench
from nestforge.tools.cli import main
from support.exports import FAMILIES, quiet, torchscript
from support.generating import save_text_llama
from support.tiny_models import add_pooling, corpus, save_tiny_encoder
from transformers import AutoModel

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
# Commands stand in blocks without a language in the README, and in blocks of `sh` in the other pages.
PAGES = {"README.md": "", "docs/index.md": "sh", "docs/install.md": "sh", "docs/tutorial.md": "sh"}
PAGES |= {str(page.relative_to(ROOT)): "sh" for page in sorted((ROOT / "docs" / "tasks").glob("*.md"))}


def all_blocks(page: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def blocks(page: str, wanted: str) -> list[str]:
    return [text for language, text in all_blocks(page) if language == wanted]


def steps(page: str) -> list[tuple[str, str]]:
    """Each command of a page, and what the page says that it prints: the block of text behind it, or below its `$ `."""
    found: list[tuple[str, str]] = []
    before = ""
    for language, text in all_blocks(page):
        if language == PAGES[page]:
            found += [(line, "") for line in text.splitlines() if line.startswith("nestforge ")]
        elif language == "text" and text.startswith("$ nestforge "):
            command, _, printed = text.removeprefix("$ ").partition("\n")
            found.append((command, printed))
        elif language == "text" and before == PAGES[page] and found:
            found[-1] = (found[-1][0], text)
        before = language
    return found


def labels(printed: str) -> set[str]:
    """Headings of tables, and labels in front of values, which another model has too; digits are `#`."""
    found: set[str] = set()
    for paragraph in re.sub(r"\d+", "#", printed).split("\n\n"):
        rows = [re.split(r"\s{2,}", line.strip()) for line in paragraph.splitlines()]
        found |= {cell for row in rows[:1] if len(row) > 2 for cell in row}
        found |= {row[0] for row in rows if len(row) > 1 and re.fullmatch("[a-z_ ]+", row[0])}
    return found


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # As long as the longest bucket that a page asks for.
    folder = save_tiny_encoder(tmp_path_factory.mktemp("readme") / "tiny", max_position_embeddings=128)
    add_pooling(folder)
    return folder


@pytest.fixture
def workplace(page: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A folder to run in, and what stands for the names that the README uses. This host is measured for the first page
    that names it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny_model.with_name("cache")))
    monkeypatch.setattr(bundle_bench, "_SECONDS", 0.05)
    monkeypatch.setattr(measure_rates, "_SECONDS_PER_ROUND", 0.01)
    monkeypatch.setattr(nest, "DEFAULT_MINUTES", 0.02)
    # A tiny model's latency is all overhead, so its budgets limit parameters instead; two levels keep this quick.
    # The language model's heads do not shrink, and most of its parameters are its vocabulary's.
    fast, kinds = BudgetSpec(parameters="80 %"), ("ffn", "heads")
    if page.endswith("generate.md"):
        fast, kinds = BudgetSpec(ffn_parameters="80 %"), ("ffn",)
    profile = replace(
        load_profile("laptop-x86"),
        buckets=(Bucket(1, 16),),
        budgets={"full": BudgetSpec(), **dict.fromkeys(("balanced", "fast", "tiny"), fast)},
        levels=dict.fromkeys(kinds, (0.5, 1.0)),
    )
    (tmp_path / "tiny.yaml").write_text(dump_profile(profile))
    texts = corpus(tmp_path / "calibration.txt").read_text()
    (tmp_path / "corpus.txt").write_text(texts)
    (tmp_path / "prompts.txt").write_text("Once upon a time\nA list of fruits: apple,\n")
    if page.endswith("check-an-export.md"):
        with quiet():
            torchscript(AutoModel.from_pretrained(tiny_model).eval(), FAMILIES["bert"], tmp_path / "model.onnx")
    return {
        "MODEL": str(tiny_model),
        "CLASSIFIER": str(save_tiny_encoder(tmp_path / "classifier", task="ForSequenceClassification")),
        "LANGUAGE_MODEL": str(save_text_llama(tmp_path / "llama")),
        "path/to/checkpoint": str(tiny_model),
        # Left by `make demo`.
        "demo/minilm": str(tiny_model),
        "demo/minilm.bundle": "my.bundle",
        "demo/corpus.txt": "corpus.txt",
        "S": "50%",
        "host-cpu": "tiny.yaml",
    }


def test_make_targets_exist() -> None:
    mentioned = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, flags=re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"demo", "test"} <= mentioned <= targets


def test_extras_exist() -> None:
    import tomllib

    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    named = re.findall(r"\.\[([a-z,]+)\]", README)
    assert named
    assert {extra for group in named for extra in group.split(",")} <= known


@pytest.mark.parametrize("page", [page for page in PAGES if steps(page)])
def test_commands(page: str, workplace: dict[str, str]) -> None:
    runner = CliRunner()
    for line, printed in sorted(steps(page), key=lambda step: "demo/minilm.bundle" in step[0]):
        arguments = [workplace.get(word, word) for word in shlex.split(line, comments=True)[1:]]
        result = runner.invoke(main, arguments, catch_exceptions=False)
        assert result.exit_code == 0, f"{line}\n{result.output}"
        assert result.stdout
        assert labels(printed) <= labels(result.stdout), line


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python(page: str, workplace: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(blocks(page, "python"))
    if not ({"nestforge.compile", "nestforge.check_parity"} & {*re.findall(r"nestforge\.\w+", text)}):
        compile_bundle(workplace["MODEL"], profile="tiny.yaml", output="my.bundle")
    for name, real in workplace.items():
        text = text.replace(f'"{name}"', repr(real))
    inputs = {name: np.ones((1, 9), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    exec(compile(text, page, "exec"), {"inputs": inputs})  # noqa: S102  (the text is our own)
    assert ("PARITY OK" if "check_parity" in text else "ffn") in capsys.readouterr().out
