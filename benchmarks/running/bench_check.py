"""Loading a bundle with every hash checked, against loading it plainly."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from ...bundle.open_bundle import Check
from ...runtime.load import load
from ..harness import Row, interleaved, ratio
from ..subjects import minilm_bundle

_MOST = 10


def run() -> list[Row]:
    bundle = minilm_bundle()

    def loading(check: Check) -> Callable[[], object]:
        return lambda: load(bundle, check=check).close()

    times = interleaved({"fast": loading("fast"), "full": loading("full")}, rounds=7)
    with load(bundle) as model:
        megabytes = sum(entry.bytes for entry in model.bundle.manifest.files) / 1e6
    plain, full, slower = median(times["fast"]), median(times["full"]), ratio(times, "full", "fast")
    return [
        Row(
            "load with every hash checked, MiniLM",
            f"{slower:.1f}x ({full:.0f} ms over {plain:.0f} ms, {megabytes:.0f} MB)",
            f"< {_MOST}x",
            slower < _MOST,
            'load(check="full") in turn with load(), no engine opened, files in the disk cache; medians',
        )
    ]
