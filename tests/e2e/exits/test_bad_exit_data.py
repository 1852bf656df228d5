"""Data and options that `nestforge calibrate` refuses, one line each, nothing written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.exit_bundles import make_rows, write_arrays
from support.processes import needs_root, nobody
from support.refusals import refused, says

BUDGET = "mean_flops<=3500"


def lines(*rows: object) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def arrays(**changes: Any) -> dict[str, Any]:
    return {name: array for name, array in (make_rows(20) | changes).items() if array is not ...}


ROW = {"text": "w1 w2", "label": 0}
DATA: dict[str, tuple[str, bytes | dict[str, Any] | None, str]] = {
    "missing": ("a.jsonl", None, "cannot be read (No such file or directory)"),
    "missing arrays": ("a.npz", None, "cannot be read (No such file or directory)"),
    "of another kind": ("a.csv", b"text,label\n", "expected a file that ends in .npz or .jsonl"),
    "without a kind": ("a", b"", "expected a file that ends in .npz or .jsonl"),
    "empty": ("a.jsonl", b"", "has no rows"),
    "empty arrays": ("a.npz", b"", "expected an NPZ file of plain arrays, as numpy.savez writes it"),
    "a blank line": ("a.jsonl", lines(ROW) + b"\n" + lines(ROW), 'line 2: expected a JSON object[...], "label": 0}'),
    "no JSON": ("a.jsonl", lines(ROW) + b"w1 w2\n", 'line 2: expected a JSON object [...] "label": 0}'),
    "a list": ("a.jsonl", lines([ROW]), 'line 1: expected a JSON object such as {"text": "...", "label": 0}'),
    "an unknown key": ("a.jsonl", lines({"text": "w1", "lable": 1}), "line 1: unknown key [...] and perhaps 'label'"),
    "no text": ("a.jsonl", lines({"label": 1}), "line 1: expected a 'text', got None"),
    "text that is a number": ("a.jsonl", lines(ROW, {"text": 5, "label": 1}), "line 2: expected a 'text', got 5"),
    "labels from the second on": (
        "a.jsonl",
        lines({"text": "w1"}, ROW),
        "line 1: has no 'label', and other lines have; label all rows or none",
    ),
    "labels of some": ("a.jsonl", lines(ROW, {"text": "w1"}), "line 2: has no 'label'[...]; label all rows or none"),
    "a label above the classes": (
        "a.jsonl",
        lines(ROW, {"text": "w1", "label": 3}),
        "line 2: label 3: expected a whole number, 0..2",
    ),
    "a label below": ("a.jsonl", lines({"text": "w1", "label": -1}), "line 1: label -1: expected a whole number, 0..2"),
    "a label that is a name": ("a.jsonl", lines({"text": "w1", "label": "spam"}), "line 1: label 'spam': [...] 0..2"),
    "a label that is true": ("a.jsonl", lines({"text": "w1", "label": True}), "line 1: label True: [...] 0..2"),
    "no UTF-8": ("a.jsonl", lines(ROW) + b"\xff\n", "line 2: not UTF-8"),
    "half a character": ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: 'text' holds half [...] is no character"),
    "a text that is too long": (
        "a.jsonl",
        lines(ROW, {"text": "w1 " * 17, "label": 0}),
        "line 2: more than 16 tokens, which the largest bucket for such requests takes; shorten it, pass",
    ),
    "no NPZ": ("a.npz", lines(ROW), "expected an NPZ file of plain arrays, as numpy.savez writes it"),
    "an input missing": ("a.npz", arrays(attention_mask=...), "inputs input_ids: expected [...], input_ids"),
    "an array too many": (
        "a.npz",
        arrays(label=np.zeros(20, int)),
        "inputs attention_mask, input_ids, label: expected exactly attention_mask, input_ids",
    ),
    "another dtype": (
        "a.npz",
        arrays(input_ids=np.zeros((20, 16), np.int32)),
        "input input_ids: expected a numpy array of int64, got int32",
    ),
    "another rank": (
        "a.npz",
        arrays(input_ids=np.zeros(20, int)),
        "input input_ids: expected int64 [batch, sequence], got shape [20]",
    ),
    "ids beyond the vocabulary": (
        "a.npz",
        arrays(input_ids=np.full((20, 16), 16)),
        "input input_ids: values 16..16, expected 0..15; do they come from this bundle's own tokenizer?",
    ),
    "labels of other rows": ("a.npz", arrays(labels=np.zeros(19, int)), "labels: [...] int64 of shape [19]"),
    "labels that are fractions": ("a.npz", arrays(labels=np.zeros(20)), "labels: expected 20 [...] of shape [20]"),
    "labels out of range": ("a.npz", arrays(labels=np.arange(20)), "labels: row 3 has 3, expected 0..2"),
    "no rows": ("a.npz", {name: array[:0] for name, array in arrays().items()}, "has no rows"),
    "objects": ("a.npz", arrays(labels=np.array([{}] * 20)), "expected an NPZ file of plain arrays, as numpy.savez"),
}


@pytest.mark.parametrize(("name", "content", "message"), DATA.values(), ids=DATA)
def test_data(bundle: Path, tmp_path: Path, name: str, content: bytes | dict[str, Any] | None, message: str) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.savez(path, **content)
    found = refused(tmp_path, "calibrate", bundle, "--data", path, "--budget", BUDGET)
    assert says(found.removeprefix(f"{path}: "), message)
    assert found.startswith(str(path)), "the line says where"


OPTIONS: dict[str, tuple[list[str], int, str]] = {
    "no budget": (["--budget", "fast"], 1, "budget 'fast': expected METRIC<=NUMBER, such as [...]ms<=50%"),
    "no number": (["--budget", "mean_flops<="], 1, "budget 'mean_flops<=': [...] mean_latency_ms<=50%"),
    "below": (["--budget", "mean_flops<5"], 1, "budget 'mean_flops<5': expected [...] such as mean_latency_ms<=50%"),
    "more than the whole": (
        ["--budget", "mean_latency_ms<=120 %"],
        1,
        "budget 'mean_latency_ms<=120 %': expected at most 100 % of the whole engine's figure",
    ),
    "a share out of reach": (["--budget", "mean_flops<=1%"], 1, " % of the whole engine's [...]; ask for more"),
    "a word": (["--budget", "mean_flops<=few"], 1, "budget 'mean_flops<=few': 'few' is not a number"),
    "NaN": (["--budget", "mean_flops<=nan"], 1, "budget mean_flops: expected a positive number, got nan"),
    "infinite": (["--budget", "mean_flops<=inf"], 1, "budget mean_flops: expected a positive number, got inf"),
    "zero": (["--budget", "p95_latency_ms<=0"], 1, "budget p95_latency_ms: expected a positive number, got 0.0"),
    "negative": (["--budget", "p95_latency_ms<=-1"], 1, "budget p95_latency_ms: expected a positive number, got -1.0"),
    "unknown metric": (["--budget", "mean_latency<=5"], 1, "'mean_latency'; did you mean 'mean_latency_ms'?"),
    "a metric's name in full": (
        ["--budget", "energy_j<=5"],
        1,
        "budget 'energy_j<=5': unknown metric 'energy_j'; expected one of mean_flops, mean_latency_ms,",
    ),
    "out of reach": (["--budget", "mean_flops<=1"], 1, "out of reach; [...] 1360 FLOPs [...]; ask for more"),
    "no batch": (["--batch", "0"], 2, "'--batch': 0 is not in the range x>=1."),
    "a batch beyond every bucket": (
        ["--batch", "9"],
        1,
        "batch 9: larger than every bucket of this bundle (b1-s8, b1-s16, b4-s8, b4-s16, b8-s8, b8-s16); ask",
    ),
    "unknown submodel": (["--submodel", "depth3"], 1, "no submodel 'depth3' [...]; it has depth2 (S), depth4 (XL)"),
    "a name that reads as a number": (
        ["--name", "0.3"],
        1,
        "name '0.3': expected a letter, then up to 79 of letters, digits and ._<=+%-, and none of inf,",
    ),
    "a name that means something": (
        ["--name", "off"],
        1,
        "name 'off': expected a letter, then up to 79 of letters, digits and ._<=+%-, and none of inf,",
    ),
    "a name that leaves the folder": (
        ["--name", "../x"],
        1,
        "name '../x': expected a letter, then up to 79 of letters, digits and ._<=+%-, and none of inf,",
    ),
    "unknown rule": (["--rule", "alone"], 2, "'--rule': 'alone' is not one of 'per_row', 'batch_max'."),
    "unknown comparison": (["--compare", ">"], 2, "'--compare': '>' is not one of '<', '<='."),
    "truncated arrays": (["--truncate"], 1, "truncate applies to text only; cut the arrays yourself"),
    "a plot of another kind": (["--plot", "a.pdf"], 2, "Error: --plot: expected a file that ends in .svg or .png"),
    "a plot without a kind": (["--plot", "a"], 2, "Error: --plot: expected a file that ends in .svg or .png"),
    "a plot in no folder": (["--plot", "nowhere/a.svg"], 1, "nowhere/a.svg: cannot be written (no such folder)"),
}


@pytest.mark.parametrize(("options", "code", "message"), OPTIONS.values(), ids=OPTIONS)
def test_options(bundle: Path, tmp_path: Path, options: list[str], code: int, message: str) -> None:
    path = write_arrays(tmp_path / "rows.npz", 20)
    if "--budget" not in options:
        options = ["--budget", BUDGET, *options]
    found = refused(tmp_path, "calibrate", bundle, "--data", path, *options, code=code)
    assert says(found, f"[...]{message}")


def test_fewer_rows_than_a_request(bundle: Path, tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "rows.npz", 3)
    found = refused(tmp_path, "calibrate", bundle, "--data", path, "--budget", BUDGET, "--batch", "4")
    assert found == "3 rows are less than one request of 4; send more, or choose smaller requests"


@pytest.mark.parametrize("name", ["a.svg", "a.PNG"])
def test_a_plot_that_exists(bundle: Path, tmp_path: Path, name: str) -> None:
    path, plot = write_arrays(tmp_path / "rows.npz", 20), tmp_path / name
    plot.touch()
    found = refused(tmp_path, "calibrate", bundle, "--data", path, "--budget", BUDGET, "--plot", plot)
    assert found == f"{plot}: exists already; choose another file"


@needs_root
def test_a_bundle_that_cannot_be_written(bundle: Path, tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "rows.npz", 20)
    with nobody(bundle, path.parent):
        found = refused(tmp_path, "calibrate", bundle, "--data", path, "--budget", BUDGET)
    assert found == f"{bundle}: cannot be written, so a calibration could not be saved; make it writable"
