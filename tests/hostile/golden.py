"""The bundles that are kept from every format, as far as this host can run them."""

from __future__ import annotations

from pathlib import Path

from nestforge.bundle.open_bundle import open_bundle

GOLDEN = Path(__file__).parents[1] / "golden"


def golden_bundles() -> list[Path]:
    """Those whose engines are not for TensorRT."""
    found = sorted(path for path in GOLDEN.glob("bundle-*") if path.is_dir())
    return [path for path in found if open_bundle(path).manifest.engines[0].backend == "onnxruntime"]
