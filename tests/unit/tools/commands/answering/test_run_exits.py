"""``nestforge run --exits``: what it asks for, and what it prints of every row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from nestforge.tools.cli import main
from support.exit_bundles import every_exit, requests, write_exits_bundle

FEEDS = requests([3, 16, 7])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("exits")
    bundle = write_exits_bundle(folder / "exits.bundle")
    np.savez(folder / "in.npz", **FEEDS)

    def call(*arguments: str | Path) -> Result:
        return CliRunner().invoke(main, ["run", str(bundle), "--inputs", str(folder / "in.npz"), *map(str, arguments)])

    return call


def test_every_row_and_what_it_cost(run: Any) -> None:
    found = every_exit(FEEDS["input_ids"], FEEDS["attention_mask"])
    result = run("--exits", "0.25,0.5", "--json")
    assert result.exit_code == 0, result.output
    exits = json.loads(result.stdout)["exits"]
    assert exits["policy"]["thresholds"] == [0.25, 0.5]
    want = []
    for row in range(3):
        index = 0 if found[0][2][row] <= 0.25 else 1 if found[1][2][row] <= 0.5 else 2
        layer = (1, 2, 4)[index]
        want.append({"exit": index, "layer": layer, "entropy": float(found[index][2][row]), "flops": 1600 * layer})
    assert [{**row, "flops_share": None} for row in exits["rows"]] == [{**row, "flops_share": None} for row in want]
    assert [row["flops_share"] for row in exits["rows"]] == [row["layer"] / 4 for row in want]

    lines = run("--exits", "0.25,0.5").stdout.splitlines()
    begin = lines.index("row  left after layer  entropy, nats  FLOPs of whole engine")
    assert [line.split() for line in lines[begin + 1 :]] == [
        [str(i), str(row["layer"]), f"{row['entropy']:.4f}", f"{25 * row['layer']:.1f}", "%"]
        for i, row in enumerate(want)
    ]


def test_one_threshold_none_and_off(run: Any) -> None:
    one = json.loads(run("--exits", "10", "--json").stdout)
    assert one["exits"]["policy"]["thresholds"] == [10.0, 10.0]
    assert [row["layer"] for row in one["exits"]["rows"]] == [1, 1, 1]
    default = json.loads(run("--json").stdout)
    assert default["exits"]["policy"]["name"] == "the model's own gate"
    off = json.loads(run("--exits", "off", "--json").stdout)
    assert off["exits"] is None
    assert off["engine"] == "depth4@b4-s16"
    assert "left after layer" not in run("--exits", "off").stdout


@pytest.mark.parametrize(
    ("exits", "message"),
    [
        ("0.1,0.2,0.3", "thresholds: expected one number, or 2 (one for every exit but the last), got 3"),
        ("nan", "thresholds: expected numbers in nats, got nan"),
        ("balanced", "has no calibration.json; run `nestforge calibrate`, or ask for thresholds"),
        ("0.1,", "has no calibration.json; run `nestforge calibrate`, or ask for thresholds"),
    ],
)
def test_refuses(run: Any, exits: str, message: str) -> None:
    result = run("--exits", exits)
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
