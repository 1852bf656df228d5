"""Rows to calibrate the small bundle with exits on, as arrays and texts, its tokenizer, and a policy of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bundle.manifest import FileEntry, TextEntry
from nestforge.bundle.open_bundle import open_bundle
from nestforge.runtime.calibrate import measure as measure_exits
from nestforge.runtime.exits.calibration import CalibratedPolicy, Costs, CurvePoint, Figures
from support.exit_bundles import VOCABULARY, every_exit, requests, write_exits_bundle, write_exits_manifest

LONGEST = 16
WORDS = ["[PAD]", *(f"w{number}" for number in range(1, VOCABULARY))]


@contextmanager
def timed_once() -> Iterator[None]:
    """For tests that do not look at how long things take: calibration times each of them once."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_TIMED_RUNS", "_MIN_ROUNDS", "_MAX_ROUNDS"):
            patch.setattr(measure_exits, name, 1)
        yield


def make_rows(count: int, seed: int = 0) -> dict[str, Any]:
    """Inputs of ``count`` rows of 1 to 16 tokens, and as label what the last exit answers, for nine rows in ten."""
    rng = np.random.default_rng(seed)
    feeds = requests(rng.integers(1, LONGEST + 1, count), LONGEST, seed)
    labels = every_exit(feeds["input_ids"], feeds["attention_mask"])[-1][1].argmax(axis=1)
    labels = np.where(rng.random(count) < 0.9, labels, (labels + 1) % 3)
    return {**feeds, "labels": labels}


def write_arrays(path: Path, count: int = 150, labelled: bool = True, seed: int = 0) -> Path:
    rows = make_rows(count, seed)
    np.savez(path, **{name: array for name, array in rows.items() if labelled or name != "labels"})
    return path


def write_texts(path: Path, count: int = 150) -> Path:
    """The rows of ``make_rows`` whose tokens are all words, a line each."""
    rows = make_rows(count)
    lines = []
    for ids, mask, label in zip(rows["input_ids"], rows["attention_mask"], rows["labels"], strict=True):
        text = " ".join(f"w{token}" for token in ids[: mask.sum()] if token)
        lines.append(json.dumps({"text": text or "w1", "label": int(label)}))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_text_bundle(folder: Path) -> Path:
    """The small bundle with exits, and a tokenizer that knows ``WORDS``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    write_exits_bundle(folder)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer: Any = Tokenizer(models.WordLevel(vocabulary, unk_token=WORDS[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    raw = str(tokenizer.to_str()).encode()
    (folder / "tokenizer.json").write_bytes(raw)
    manifest = open_bundle(folder).manifest
    files = (*manifest.files, FileEntry("tokenizer.json", len(raw), hashlib.sha256(raw).hexdigest()))
    text = TextEntry("tokenizer.json", "input_ids", "attention_mask", None, None)
    write_exits_manifest(folder, replace(manifest, files=files, text=text))
    return folder


COSTS = Costs(1e6, 2.0, 1.9, 3.0, 3.5)
FIGURES = Figures(10, COSTS, 0.9, (5, 2, 3))
POINT = CurvePoint(0.25, FIGURES)


def policy(name: str = "lean", submodel: str = "depth4") -> CalibratedPolicy:
    exits = {"depth4": 3, "depth2": 2}[submodel]
    return CalibratedPolicy(
        name=name,
        submodel=submodel,
        budget="mean_latency_ms<=2",
        batch=1,
        thresholds=(0.25, 0.5)[: exits - 1],
        compare="<=",
        rule="per_row",
        histogram=(5, 2, 3)[:exits],
        quality_is="accuracy",
        data_sha256="0" * 64,
        rows=10,
        truncated_rows=0,
        correction=1.01,
        simulated=FIGURES,
        measured=FIGURES,
        whole=FIGURES,
        curve=(POINT,),
        global_point=POINT,
        best_point=POINT,
        engines=("depth4@b1-s8",),
        processor="a processor",
        threads=2,
        created="2026-11-21T00:00:00+00:00",
    )
