"""``nestforge run`` of several texts, and with a limit in time: runs, first runs, and limits that were missed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from nestforge.tools.cli import main
from support.sealing import edit_sealed

TEXTS = ("--text", "the quick fox", "--text", "the fox")


def run(bundle: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["run", str(bundle), *options])


def test_several_texts_are_answered_in_runs_that_are_shown(compiled: Any) -> None:
    data = json.loads(run(compiled.bundle, *TEXTS, "--json").stdout)
    assert [each["rows"] for each in data["runs"]] == [[0], [1]]
    assert data["outputs"]["sentence_embedding"]["shape"][0] == 2
    lines = run(compiled.bundle, *TEXTS).stdout.splitlines()
    shown = [line.split(" in ")[0] for line in lines if line.startswith("run ")]
    assert shown == ["run 1     row 0 padded b1-s5 -> b1-s8", "run 2     row 1 padded b1-s4 -> b1-s8"]


def test_a_limit_is_judged_by_a_run_that_is_not_the_first(compiled: Any) -> None:
    data = json.loads(run(compiled.bundle, *TEXTS[:2], "--latency-ms", "1e6", "--json").stdout)
    assert data["limit"] == {
        "name": "latency_ms",
        "allowed_ms": 1e6,
        "took_ms": data["timings_ms"]["run"],
        "kept": True,
    }
    assert data["first_run_ms"] != data["timings_ms"]["run"]
    assert data["timings_ms"]["open"] == 0 or data["timings_ms"]["open"] < 1
    lines = run(compiled.bundle, *TEXTS[:2], "--latency-ms", "1e6").stdout
    assert "(first run " in lines
    assert "\nlimit     `--latency-ms 1e+06` kept: took " in lines
    alone = run(compiled.bundle, *TEXTS[:2]).stdout
    assert ", first run " in alone
    assert "limit" not in alone.replace("no limit asked", "")


def test_a_missed_limit_is_said(compiled: Any, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(compiled.bundle, tmp_path / "b"))

    def wrong(record: Any) -> None:
        for latency in record["latencies"]:
            for name in [name for name in latency if name.endswith("_ms")]:
                latency[name] = 1e-6

    edit_sealed(bundle / "build.json", wrong)
    found = run(bundle, *TEXTS[:2], "--latency-ms", "1e-5")
    assert found.exit_code == 0
    assert "\nlimit     `--latency-ms 1e-05` missed: took " in found.stdout
    assert found.stderr.startswith("\nwarning: `--latency-ms 1e-05` missed: took ")
    assert "`nestforge measure`" in found.stderr
