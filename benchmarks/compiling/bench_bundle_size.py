"""Bytes of a bundle of 64 submodels, against the bytes of its weights."""

from __future__ import annotations

from ...bundle.manifest import WEIGHTS_NAME
from ...bundle.open_bundle import open_bundle
from ..harness import Row
from ..subjects import bert_base_bundle


def run() -> list[Row]:
    bundle = open_bundle(bert_base_bundle())
    weights = bundle.file(WEIGHTS_NAME).stat().st_size
    total = sum(path.stat().st_size for path in bundle.path.iterdir())
    count = len(bundle.manifest.submodels)
    return [
        Row(
            f"bundle of {count} submodels, BERT-base shape",
            f"{total / weights:.4f}x ({total / 1e6:.1f} MB over {weights / 1e6:.1f} MB)",
            "64 submodels, <= 1.05x",
            count == 64 and total / weights <= 1.05,
            "all files of the bundle against weights.safetensors",
        )
    ]
