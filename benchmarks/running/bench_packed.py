"""Our packed engine against the plain export of the same submodel in a default session."""

from __future__ import annotations

from pathlib import Path

from ..harness import Row, interleaved, ratio
from ..subjects import CORES, Subject, bert_base, bert_base_bundle, default_session, minilm, minilm_bundle, packed


def run() -> list[Row]:
    return [
        _row(bert_base(), bert_base_bundle(), "ffn3072-heads12", rounds=15),
        _row(bert_base(), bert_base_bundle(), "ffn1536-heads6", rounds=20),
        _row(minilm(), minilm_bundle(), "ffn1536-heads12", rounds=40),
        _row(minilm(), minilm_bundle(), "ffn768-heads6", rounds=60),
    ]


def _row(subject: Subject, bundle: Path, submodel: str, rounds: int) -> Row:
    plain = default_session(subject.plain(submodel))
    with packed(bundle, submodel) as ours:
        calls = {"plain": lambda: plain.run(None, ours.feeds), "ours": lambda: ours.runner.run(ours.feeds)}
        times = interleaved(calls, rounds)
    speed = ratio(times, "plain", "ours")
    return Row(
        f"packed {subject.name} {submodel}",
        f"{speed:.3f}x the plain export's speed (best {min(times['ours']):.1f} against {min(times['plain']):.1f} ms)",
        ">= 0.98x",
        speed >= 0.98,
        f"median ratio of {rounds} interleaved rounds, 1x128, {CORES} threads",
    )
