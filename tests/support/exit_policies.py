"""A calibrated policy for the bundle of exit_bundles.py."""

from __future__ import annotations

from nestforge.runtime.exits.calibration import CalibratedPolicy, Costs, CurvePoint, Figures

COSTS = Costs(1e6, 2.0, 1.9, 3.0, 3.5)
FIGURES = Figures(10, COSTS, 0.9, (5, 2, 3))
POINT = CurvePoint(0.25, FIGURES)


def policy(name: str = "lean", submodel: str = "depth4") -> CalibratedPolicy:
    exits = {"depth4": 3, "depth2": 2}[submodel]
    return CalibratedPolicy(
        name=name,
        submodel=submodel,
        budget="mean_latency_ms<=2",
        batch=1,
        thresholds=(0.25, 0.5)[: exits - 1],
        compare="<=",
        rule="per_row",
        histogram=(5, 2, 3)[:exits],
        quality_is="accuracy",
        data_sha256="0" * 64,
        rows=10,
        truncated_rows=0,
        correction=1.01,
        simulated=FIGURES,
        measured=FIGURES,
        whole=FIGURES,
        curve=(POINT,),
        global_point=POINT,
        best_point=POINT,
        engines=("depth4@b1-s8",),
        processor="a processor",
        threads=2,
        created="2026-11-21T00:00:00+00:00",
    )
