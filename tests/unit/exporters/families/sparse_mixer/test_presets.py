"""The paper's models: their parameters (Table 8, and part by part), and where their layers attend and have experts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from math import prod

import pytest
from click.testing import CliRunner
from nestforge.exporters.families.sparse_mixer.ops import parameter_shapes
from nestforge.exporters.families.sparse_mixer.presets import PRESETS, placed
from nestforge.tools.cli import main

COMMANDS = ("inspect", "plan")


def count(name: str, pattern: str = ".*") -> int:
    return sum(prod(shape) for key, shape in parameter_shapes(PRESETS[name]).items() if re.fullmatch(pattern, key))


@pytest.mark.parametrize(
    ("name", "exact", "published"),
    [
        ("bert-base", 111_835_138, 112),
        ("sparse-mixer-base", 182_356_802, 180),
        ("fast-sparse-mixer-base", 182_356_802, 180),
        ("sparse-mixer-base-ff2056", 182_963_602, 180),
        ("fast-sparse-mixer-base-ff2056", 182_963_602, 180),
    ],
)
def test_parameters_round_to_those_published(name: str, exact: int, published: int) -> None:
    """Table 8 in millions, Sparse Mixers to two digits."""
    d = PRESETS[name].hidden_size
    neurons = PRESETS[name].intermediate_size
    square, ffn = d * d + d, 2 * d * neurons + neurons + d
    outside = (32_000 + 512 + 4 + 2) * d + square  # tables, their norm, projection
    heads = square + (square + 2 * d + 32_000) + 2 * d + 2  # pooler, tokens, labels
    if name == "bert-base":
        layers = 12 * (4 * square + ffn + 4 * d)
    else:
        layers = 10 * (512**2 + d * d) + 4 * 4 * square + 10 * ffn + 4 * (16 * ffn + 16 * d + 16) + 14 * 4 * d
    assert count(name) == outside + layers + heads == exact
    assert round(exact / 1e6, 0 if published == 112 else -1) == published


def test_sparse_mixer_base_part_by_part() -> None:
    parts = {
        "embeddings and projection": r"embeddings\..*",
        "mixing": r"layers\.\d+\.mixing\..*",
        "attention": r"layers\.\d+\.attention\..*",
        "norms, pooler and heads": r"layers\.\d+\.(mixing|ffn)_norm\..*|pooler\..*|head\..*|classifier\..*",
        "dense": r"layers\.\d+\.ffn\..*",
        "experts": r"layers\.\d+\.moe\.experts\..*",
        "routers": r"layers\.\d+\.moe\.router\..*",
    }
    millions = {part: round(count("sparse-mixer-base", pattern) / 1e6, 2) for part, pattern in parts.items()}
    assert millions == {
        "embeddings and projection": 16.91,
        "mixing": 5.24,
        "attention": 4.2,
        "norms, pooler and heads": 0.59,
        "dense": 21.0,
        "experts": 134.38,
        "routers": 0.03,
    }
    assert count("sparse-mixer-base", r"layers\.0\.ffn\..*") == 2_099_712


def test_layers_of_the_chosen_models() -> None:
    base, small = PRESETS["sparse-mixer-base"], PRESETS["sparse-mixer-small"]
    assert (base.attention_layers, base.moe_layers) == ((10, 11, 12, 13), (5, 6, 7, 8))
    assert (small.attention_layers, small.moe_layers) == ((4, 5, 6, 7), (2, 3, 4, 5)), "4 and 5 attend and route"
    for name, model in PRESETS.items():
        assert model.problem() is None, name
        assert model.head_dim == 64
        assert model.intermediate_size == (2056 if name.endswith("-ff2056") else 4 * model.hidden_size), name
    assert PRESETS["bert-base"].attention_layers == tuple(range(12))
    assert [PRESETS[f"{speed}sparse-mixer-base"].capacity_factor for speed in ("", "fast-")] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("layout", "number", "layers", "chosen"),
    [
        ("top", 4, 14, (10, 11, 12, 13)),
        ("bottom", 6, 12, (0, 1, 2, 3, 4, 5)),
        ("middle", 4, 14, (5, 6, 7, 8)),
        ("middle", 6, 12, (3, 4, 5, 6, 7, 8)),
        ("mixed", 6, 12, (0, 2, 4, 6, 8, 10)),
        ("mixed", 4, 12, (0, 3, 6, 9)),
        ("mixed", 12, 12, tuple(range(12))),
        ("mixed-odd", 6, 12, (1, 3, 5, 7, 9, 11)),
        ("mixed", 4, 14, (0, 3, 6, 9, 12)),  # 14 // 4: five, as in the reference code
        ("mixed", 0, 12, ()),
        ("top", 0, 12, ()),
    ],
)
def test_layouts(layout: str, number: int, layers: int, chosen: tuple[int, ...]) -> None:
    assert placed(layout, number, layers) == chosen  # type: ignore[arg-type]


def test_more_layers_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"^count: expected 0 to 4, got 5$"):
        placed("top", 5, 4)


def test_the_models_of_the_tables_are_all_there() -> None:
    tables = {
        1: ["fourier-mixer", "hartley-mixer", "circulant-mixer", "toeplitz-mixer", "linear-mixer"],
        2: [f"{kind}-mixer-{k}" for kind in ("hartley", "linear") for k in (1, 2, 3, 4, 6)],
        3: ["linear-mixer-4-d512", "linear-mixer-4-d256", "linear-mixer-4-d128"],
        4: ["linear-mixer-4-moe6-mixed-tokens-choose", "linear-mixer-4-moe6-mixed"],
        5: [
            f"linear-mixer-4-moe{layout}"
            for layout in ("2-mixed", "4-mixed", "12-mixed", "6-bottom", "6-middle", "6-mixed-odd", "6-top")
        ],
        9: ["sparse-mixer-base-g2048", "sparse-mixer-base-cf75-g2048"],
    }
    chosen = ["sparse-mixer-base", "fast-sparse-mixer-base", "sparse-mixer-small", "bert-base"]
    chosen += ["sparse-mixer-base-ff2056", "fast-sparse-mixer-base-ff2056"]
    assert sorted([*chosen, *(name for names in tables.values() for name in names)]) == sorted(PRESETS)
    routed = PRESETS["linear-mixer-4-moe6-mixed-tokens-choose"]
    assert (routed.router, routed.batch_prioritized, routed.moe_layers) == ("tokens_choose", True, (0, 2, 4, 6, 8, 10))
    assert {PRESETS[name].num_hidden_layers for table in range(1, 6) for name in tables[table]} == {12}
    assert [PRESETS[name].hidden_size for name in tables[3]] == [512, 256, 128]


def test_inspect_takes_a_preset() -> None:
    options = ["--profile", "raspberry-pi-5", "--bucket", "1x512", "--json"]
    found = CliRunner().invoke(main, ["inspect", "preset:sparse-mixer-base", *options])
    assert found.exit_code == 0, found.stderr
    view = json.loads(found.stdout)
    assert (view["family"], [axis["name"] for axis in view["axes"]]) == (
        "sparse_mixer",
        ["moe.capacity_factor", "moe.group_size", "moe.experts"],
    )
    assert [level["submodel"] for level in view["levels"]] == [
        f"moe.capacity_factor{percent}-moe.group_size4096-moe.experts16" for percent in (25, 50, 75, 100)
    ]
    assert {level["parameters"] for level in view["levels"]} == {182_356_802}, "capacity has no weights"
    macs = [level["macs"]["b1-s512"] for level in view["levels"]]
    quarter = 2 * 512 // 4 * 512 * 2048 * 4  # up and down, a quarter of the tokens, d, f, layers
    assert [high - low for low, high in pairwise(macs)] == [quarter] * 3


def test_inspect_takes_a_model_without_axes() -> None:
    options = ["--profile", "raspberry-pi-5", "--bucket", "1x512"]
    found = CliRunner().invoke(main, ["inspect", "preset:bert-base", *options])
    assert found.exit_code == 0, found.stderr
    assert re.search(r"^ *100% +111\.84 ", found.stdout, re.MULTILINE)


def test_inspect_and_plan_count_the_same_engines() -> None:
    """In the variants that the profile gets; FFNs that never shrink have no column of their own."""
    options = ["preset:sparse-mixer-base", "--profile", "laptop-x86", "--bucket", "1x512"]
    seen, planned = (json.loads(CliRunner().invoke(main, [name, *options, "--json"]).stdout) for name in COMMANDS)
    assert {level["submodel"]: level["flops"]["b1-s512"] for level in seen["levels"]} == {
        candidate["id"]: candidate["costs"][0]["flops"] for candidate in planned["candidates"]
    }
    assert seen["variants"] == planned["variants"]
    assert {view["variants"]["moe.products"] for view in seen["variants"]} == {"per_expert"}
    for name in COMMANDS:
        text = CliRunner().invoke(main, [name, *options]).stdout
        assert re.search(r"^variant of moe\.products +per_expert$", text, re.MULTILINE)
        assert re.search(r"^submodel +M params +M non-emb\. +(weights|memory) MB +GFLOPs", text, re.MULTILINE)


def test_plan_takes_a_preset() -> None:
    budget = ["--profile", "laptop-x86", "--bucket", "1x512", "--budget", "flops<=57.5G"]
    planned = CliRunner().invoke(main, ["plan", "preset:sparse-mixer-base", *budget])
    assert planned.exit_code == 0, planned.stderr
    assert re.search(r"^budget \S+ \(.*\): moe\.capacity_factor75$", planned.stdout, re.MULTILINE)


def test_a_bucket_that_the_mixing_cannot_serve() -> None:
    result = CliRunner().invoke(
        main, ["plan", "preset:sparse-mixer-base", "--profile", "laptop-x86", "--bucket", "4x128"]
    )
    assert result.exit_code == 1
    assert result.stderr == (
        "nestforge: error: bucket b4-s128: linear mixing is bound to 512 tokens; ask for bucket b4-s512, to which "
        "shorter texts are padded\n"
    )


def test_presets_need_no_torch() -> None:
    program = """
import sys
sys.modules["torch"] = None
from nestforge.bucket import Bucket
from nestforge.exporters.source import open_source
source = open_source("preset:sparse-mixer-small")
universal, bucket = source.spec.universal(), Bucket(1, 512)
source.signature, source.workload(universal, bucket), source.parameters(universal)
for ask in (source.variants, source.metadata, source.routes):
    assert ask(universal, bucket)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
