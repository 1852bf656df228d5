"""Emitting one more submodel, against tracing and saving it."""

from __future__ import annotations

from statistics import median

from ..harness import Row, milliseconds
from ..subjects import bert_base, export_plain

_HALF = "ffn1536-heads6"


def run() -> list[Row]:
    subject = bert_base()
    ours = median(milliseconds(lambda: subject.engine(_HALF)) for _ in range(50))
    path = subject.folder / "traced-again.onnx"
    plain = min(milliseconds(lambda: export_plain(subject, _HALF, path)) for _ in range(2))
    return [
        Row(
            "emit one more submodel, BERT-base shape",
            f"{plain / ours:,.0f}x ({ours:.2f} ms against {plain:,.0f} ms)",
            ">= 100x",
            plain / ours >= 100,
            "emit and write, median of 50, against torch.onnx.export and save, best of 2",
        )
    ]
