"""Opening one more engine over the shared store, against a default session."""

from __future__ import annotations

from statistics import median

from ...bundle.open_bundle import open_bundle
from ...runtime.engines.runner import runner_for
from ..harness import Row, milliseconds
from ..subjects import CORES, bert_base, bert_base_bundle, default_session


def run() -> list[Row]:
    bundle = open_bundle(bert_base_bundle())
    engines = bundle.manifest.engines[-1::-6][:10]

    def open_shared(index: int) -> None:
        with runner_for(bundle, engines[index], "shared", CORES):
            pass

    plain = bert_base().plain(engines[0].submodel)
    open_shared(0)  # the bundle's first engine also warms the file cache
    default_session(plain)
    ours, alone = [], []
    for index in range(1, len(engines)):  # in turn, so that a slow minute slows both
        ours.append(milliseconds(lambda: open_shared(index)))  # noqa: B023  (called at once)
        alone.append(milliseconds(lambda: default_session(plain)))
    faster = median(a / b for a, b in zip(alone, ours, strict=True))
    return [
        Row(
            "open one more engine, BERT-base shape",
            f"{median(ours):.1f} ms, {faster:.0f}x faster (default session {median(alone):.0f} ms)",
            "< 50 ms and >= 10x",
            median(ours) < 50 and faster >= 10,
            f"{len(ours)} shared engines, each in turn with a default session of a plain export; medians",
        )
    ]
