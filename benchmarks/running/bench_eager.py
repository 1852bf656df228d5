"""Our packed engine against PyTorch eager."""

from __future__ import annotations

from pathlib import Path

from ..harness import Row, interleaved, ratio
from ..subjects import CORES, Subject, bert_base, bert_base_bundle, eager_call, minilm, minilm_bundle, packed


def run() -> list[Row]:
    return [_row(bert_base(), bert_base_bundle(), rounds=12), _row(minilm(), minilm_bundle(), rounds=30)]


def _row(subject: Subject, bundle: Path, rounds: int) -> Row:
    eager = eager_call(subject.model.module, subject.feeds())
    with packed(bundle, subject.model.spec.universal().id) as ours:
        times = interleaved({"eager": eager, "ours": lambda: ours.runner.run(ours.feeds)}, rounds)
    speed = ratio(times, "eager", "ours")
    return Row(
        f"engine against PyTorch eager, {subject.name}",
        f"{speed:.2f}x (best {min(times['ours']):.1f} against {min(times['eager']):.1f} ms)",
        ">= 1.8x",
        speed >= 1.8,
        f"median ratio of {rounds} interleaved rounds, batch 1, 128 tokens, {CORES} threads each",
    )
