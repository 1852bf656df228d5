"""Texts of many lengths on one engine of a range, against a plain export of the same model with free dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import sleep

import numpy as np
import torch
from torch.export import Dim

from ...compiler.examples.rank_axes import text_encoder
from ...examples.encoder.corpus import write_corpus
from ...runtime.inputs.arrays import Array
from ...runtime.load import load
from ..harness import Row, milliseconds
from ..kept import CACHE
from ..subjects import CORES, Subject, default_session, minilm, minilm_range_bundle

_TEXTS = 300
_BAND = 16  # tokens
_ROWS = 32
_PASSES = 8
# Default sessions spin on for a while after a run, on the cores that the next one needs.
_PAUSE = 0.2

Feeds = dict[str, Array]


def run() -> list[Row]:
    subject, texts = minilm(), _texts()
    encoder = text_encoder(subject.model)
    longest = subject.model.source.signature.max_sequence
    assert encoder is not None
    assert longest is not None
    single: list[Feeds] = [dict(encoder.encode([text], longest).feeds) for text in texts]
    lengths = np.array([feeds["input_ids"].shape[1] for feeds in single])
    ordered = [texts[row] for row in np.argsort(lengths)]
    together = [
        dict(encoder.encode(ordered[start : start + _ROWS], longest).feeds) for start in range(0, len(texts), _ROWS)
    ]
    plain = default_session(_plain(subject))
    with load(minilm_range_bundle(), residency="packed", threads=CORES) as model:
        calls: list[Callable[[Feeds], object]] = [model, lambda feeds: plain.run(None, feeds)]
        ours, theirs = _times(calls, single)
        ours_together, theirs_together = _times(calls, together)
    places = (lengths - 1) // _BAND
    bands = [float(ours[places == band].mean() / theirs[places == band].mean()) for band in np.unique(places)]
    whole, rate = float(ours.mean() / theirs.mean()), float(theirs_together.sum() / ours_together.sum())
    figures = (
        ("texts one by one, MiniLM packed, time over a plain dynamic export", whole, "<= 1.00x", whole <= 1.0),
        (f"the same, worst of {len(bands)} bands of {_BAND} tokens", max(bands), "<= 1.03x", max(bands) <= 1.03),
        (f"the same in sorted batches of {_ROWS}, texts per second", rate, ">= 1.00x", rate >= 1.0),
    )
    how = (
        f"medians of {_PASSES} passes in turn over {_TEXTS} docstrings, median {median(lengths.tolist()):g} tokens, "
        f"{CORES} threads"
    )
    return [Row(figure, f"{measured:.3f}x", bar, reached, how) for figure, measured, bar, reached in figures]


def _times(calls: Sequence[Callable[[Feeds], object]], requests: Sequence[Feeds]) -> list[Array]:
    """Median milliseconds of each request, by call; each pass runs one call on all requests."""
    passes: list[list[list[float]]] = [[] for _ in calls]
    for _ in range(_PASSES):
        for call, times in zip(calls, passes, strict=True):
            sleep(_PAUSE)
            call(requests[0])
            times.append([milliseconds(partial(call, feeds)) for feeds in requests])
    return [np.median(np.array(times), axis=0) for times in passes]


def _texts() -> list[str]:
    path = CACHE / "corpus.txt"
    if not path.exists():
        write_corpus(path)
    return path.read_text(encoding="utf-8").splitlines()[:_TEXTS]


def _plain(subject: Subject) -> Path:
    """What ``torch.onnx.export`` writes for the whole model with batch and sequence free."""
    path = subject.folder / "dynamic.onnx"
    if not path.exists():
        signature = subject.model.source.signature
        dims = {0: Dim("batch", min=1, max=_ROWS), 1: Dim("sequence", min=1, max=signature.max_sequence)}
        program = torch.onnx.export(
            subject.model.module,
            tuple(torch.ones(2, 9, dtype=torch.int64) for _ in signature.inputs),
            dynamo=True,
            input_names=[spec.name for spec in signature.inputs],
            output_names=[spec.name for spec in signature.outputs],
            dynamic_shapes=(tuple(dict(dims) for _ in signature.inputs),),
            verbose=False,
        )
        assert program is not None
        program.save(str(path), external_data=True)
    return path
