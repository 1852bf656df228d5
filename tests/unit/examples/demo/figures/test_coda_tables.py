from __future__ import annotations

from nestforge.bucket import Bucket
from nestforge.examples.demo.figures.coda_tables import Measured, quality_table, routing_table


def test_each_reduction_beside_the_dense_adapter_model() -> None:
    found = [
        Measured("selected", 4, 16, 0.75, 1_000_000, (0.5, 8.0)),
        Measured("selected", 1, 64, 0.8, 4_000_000, (1.0, 20.0)),
        Measured("all", 1, 64, 0.9, 4_000_000, (2.0, 30.0)),
    ]
    table = quality_table(found, [Bucket(1, 1), Bucket(64, 1)])
    assert table.columns[-4:] == ["ms, batch 1", "faster", "ms, batch 64", "faster"]
    assert [list(row) for row in table.rows] == [
        ["k-to-k", "4", "16", "75.0%", "1.00", "4.00x", "0.500", "2.00x", "8.000", "2.50x"],
        ["k-to-k", "1", "64", "80.0%", "4.00", "1.00x", "1.000", "1.00x", "20.000", "1.00x"],
        ["k-to-all", "1", "64", "90.0%", "4.00", "1.00x", "2.000", "1.00x", "30.000", "1.00x"],
    ]


def test_gates_and_choices_of_each_layer() -> None:
    layers = [
        {"mean_gate": 0.5, "gates_vanished": 0.0, "ink": 0.4},
        {"mean_gate": 0.25, "gates_vanished": 0.1, "ink": 1.0},
    ]
    table = routing_table({"all": [{"reduction": 8, "layers": layers}, {"reduction": 1, "layers": []}]})
    assert [list(row) for row in table.rows] == [["k-to-all", "8", "0.50 0.25", "5.0%", "40% 100%"]]
