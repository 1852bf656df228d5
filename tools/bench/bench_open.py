"""Opening one more engine over the shared store, against a default session."""

from __future__ import annotations

from statistics import median

from ...runtime.bundle import open_bundle
from ...runtime.runner import runner_for
from .harness import Row, milliseconds
from .subjects import CORES, bert_base, bert_base_bundle, default_session


def run() -> list[Row]:
    bundle = open_bundle(bert_base_bundle())
    engines = bundle.manifest.engines[-1::-6][:10]

    def open_shared(index: int) -> None:
        with runner_for(bundle, engines[index], "shared", CORES):
            pass

    plain = bert_base().plain(engines[0].submodel)
    open_shared(0)  # the bundle's first engine also warms the file cache
    default_session(plain)
    ours = median(milliseconds(lambda i=index: open_shared(i)) for index in range(1, len(engines)))  # type: ignore[misc]
    alone = median(milliseconds(lambda: default_session(plain)) for _ in range(5))
    return [
        Row(
            "open one more engine, BERT-base shape",
            f"{ours:.1f} ms, {alone / ours:.0f}x faster (default session {alone:.0f} ms)",
            "< 50 ms and >= 10x",
            ours < 50 and alone / ours >= 10,
            "median of 9 shared engines against 5 default sessions of a plain export",
        )
    ]
