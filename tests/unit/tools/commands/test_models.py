"""Budgets, shapes, explicit assignments and slices on the command line: plan, compile and mixnmatch."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.planning.candidate import VariantView
from nestforge.exporters.source import open_source
from nestforge.runtime.summary import ShortNames
from nestforge.tables import Table
from nestforge.tools.commands.models import shared_variants, variant_tables
from safetensors.torch import load_file, save_file
from support.commands import error_of, json_of, nestforge
from support.tiny_matlm import save_sure_matlm
from support.tiny_models import corpus


def test_plan_takes_budgets_and_a_promotion_order(compiled: Any) -> None:
    options = [
        "--budget",
        "ffn_parameters<=60%",
        "--budget",
        "parameters<=90%,flops<=90 %",
        "--promotion-order",
        "decreasing",
    ]
    data = json_of("plan", compiled.model, "--profile", compiled.profile, *options)
    first, second = data["budgets"]
    source = open_source(compiled.model)
    assert (first["name"], second["name"]) == ("ffn_parameters<=60%", "parameters<=90%,flops<=90%")
    assert first["limits"] == {"ffn_parameters": int(0.6 * source.parameter_groups(source.spec.universal()).ffn)}
    assert data["candidates"][1]["id"] == "ffn32x1_16x2-heads2x1_1x2", "the first layer is promoted first"
    assert data["candidates"][-1]["non_embedding_parameters"] == data["candidates"][-1]["parameters"] - 106 * 32
    text = nestforge("plan", compiled.model, "--profile", compiled.profile, *options).stdout
    assert "  M params  M non-emb.  M FFN  memory MB" in text
    assert "largest that keeps FFN parameters " in text
    assert re.search(
        r"\ncompile takes +about [\d,]+ MB of memory and \d+ MB of mapped files, \d+ MB of disk, \d+ CPU s", text
    )
    assert data["cost"].keys() == {"memory_mb", "widened_mb", "mapped_mb", "disk_mb", "cpu_seconds"}


def test_budgets_that_make_no_sense(compiled: Any) -> None:
    result = nestforge("plan", compiled.model, "--profile", compiled.profile, "--budget", "ffn<=1M")
    assert result.exit_code == 2
    assert "budget 'ffn<=1M': unknown key 'ffn'" in result.stderr
    assert nestforge("plan", compiled.model, "--promotion-order", "flat").exit_code == 2


@pytest.fixture(scope="module")
def matlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sure_matlm(tmp_path_factory.mktemp("matlm") / "lm", 10)


def published(matlm: Path, folder: Path, widths: list[int]) -> Path:
    """A slice of ``matlm``, as somebody would publish it."""
    shutil.copytree(matlm, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": widths}))
    weights = load_file(folder / "model.safetensors")
    for layer, width in enumerate(widths):
        up, down = f"layers.{layer}.ffn.up.weight", f"layers.{layer}.ffn.down.weight"
        weights |= {up: weights[up][:width].contiguous(), down: weights[down][:, :width].contiguous()}
    save_file(weights, folder / "model.safetensors")
    return folder


def test_a_published_slice_is_built_too(matlm: Path, compiled: Any, tmp_path: Path) -> None:
    part = published(matlm, tmp_path / "slice", [5, 11])
    output = tmp_path / "lm.bundle"
    options = ["--profile", compiled.profile, "--include", "budgets", "--budget", "ffn_parameters<=50%"]
    data = json_of("compile", matlm, *options, "--slice", part, "--output", output)
    ids = [entry["id"] for entry in data["manifest"]["submodels"]]
    assert "ffn5x1_11x1" in ids, "widths of a published slice need no multiple"
    assert data["manifest"]["provenance"]["options"]["slices"] == ["ffn5x1_11x1"]
    assert open_bundle(output).manifest.submodel("ffn5x1_11x1").values == {"ffn": (5, 11)}


def test_a_folder_that_is_no_slice_is_refused(matlm: Path, compiled: Any, tmp_path: Path) -> None:
    part = published(matlm, tmp_path / "slice", [8, 16])
    weights = load_file(part / "model.safetensors")
    save_file({**weights, "layers.1.ffn.up.weight": weights["layers.1.ffn.up.weight"] + 1}, part / "model.safetensors")
    arguments = ["compile", matlm, "--profile", compiled.profile, "--slice", part, "--output", tmp_path / "lm.bundle"]
    message = error_of(*arguments)
    assert "layers.1.ffn.up.weight" in message
    assert "the levels are not nested" in message
    assert [path.name for path in tmp_path.iterdir()] == ["slice"]


def test_mixnmatch_prints_every_way(compiled: Any, tmp_path: Path) -> None:
    texts = corpus(tmp_path / "texts.txt", 300)
    arguments = ["mixnmatch", compiled.model, "--text", texts, "--profile", compiled.profile]
    options = ["--budget", "ffn_parameters<=60%", "--evaluations", "6"]
    data = json_of(*arguments, *options)
    ways = [row["way"] for row in data["assignments"]]
    assert ways == ["S", "M", "L", "XL", "increasing", "decreasing", "up-down", "down-up", "best of the search"]
    assert data["metric"] == "ffn_parameters"
    assert 1 <= data["evaluations"] <= 6
    lines = nestforge(*arguments, *options).stdout.splitlines()
    assert lines[1].startswith("budget  ffn_parameters <= ")
    assert lines[5].split() == ["assignment", "ffn_parameters", "loss"]
    ids = lines.index("", 5) + 1
    assert lines[ids].split() == ["assignment", "id"]
    assert lines[ids + 1].split() == ["S", data["assignments"][0]["submodel"]]
    assert error_of(*arguments, "--budget", "parameters<=1").startswith("budget 'parameters<=1': not even")


NAMES = ShortNames({"ffn8": "a"})


def test_what_all_share_is_a_fact_and_the_rest_a_table() -> None:
    few, many = ({"sum": variant, "copy": "by_index"} for variant in ("few", "many"))
    views = [VariantView("ffn8", "b1-s4", few), VariantView("ffn8", "b1-s8", many)]
    assert shared_variants(views) == [("variant of copy", "by_index")]
    (table,) = variant_tables(views, NAMES)
    assert table == Table(["submodel", "bucket", "variant of sum"], [["a", "b1-s4", "few"], ["a", "b1-s8", "many"]])
    assert shared_variants(views[:1]) == [("variant of sum", "few"), ("variant of copy", "by_index")]
    assert not [*variant_tables(views[:1], NAMES)]


def test_most_models_have_one_variant_of_everything() -> None:
    assert shared_variants(()) == []
    assert not [*variant_tables((), NAMES)]
