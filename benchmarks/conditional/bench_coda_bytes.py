"""What four reductions of a CODA encoder weigh over one: one weight store, and a graph for each."""

from __future__ import annotations

from pathlib import Path

from ...bundle.open_bundle import open_bundle
from ..harness import Row
from .coda_subject import LAYERS, OFFERED, coda_bundle, coda_config

_BYTES = 1.01


def run() -> list[Row]:
    config = coda_config("k-to-all")
    four, one = (_size(coda_bundle(config, reductions)) for reductions in (OFFERED, (1,)))
    return [
        Row(
            "CODA: four reductions over one, bytes of the bundle",
            f"{four / one:.4f}x ({four / 1e6:.1f} MB over {one / 1e6:.1f} MB)",
            f"<= {_BYTES}x",
            four / one <= _BYTES,
            f"all files; {LAYERS} layers of base width",
        )
    ]


def _size(bundle: Path) -> int:
    return sum(path.stat().st_size for path in open_bundle(bundle).path.iterdir())
