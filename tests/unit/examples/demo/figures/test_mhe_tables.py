from __future__ import annotations

import pytest
from nestforge.examples.demo.figures.mhe_tables import (
    Timed,
    Trained,
    Writing,
    elasticity,
    forms_table,
    quality_table,
    retained,
    writing_table,
)

# GLUE and WikiText-103 of the paper, with the parameters of its BERT-base.
SHA = Trained("sha", 12 * 147_456, 12 * 737_280, 79.2)
MUL = Trained("mhe_mul", 12 * 149_760, 12 * 739_584, 80.6)
MHA = Trained("mha", 12 * 1_769_472, 12 * 2_359_296, 81.9)


def test_the_papers_metrics() -> None:
    assert retained(80.6, 81.9, is_perplexity=False) == pytest.approx(0.984, abs=5e-4)
    assert retained(53.8, 43.0, is_perplexity=True) == pytest.approx(0.749, abs=5e-4)
    assert elasticity(SHA, SHA, is_perplexity=False) is None
    assert elasticity(MUL, SHA, is_perplexity=False) == pytest.approx(5.65, abs=0.1)  # 5.53 of an unrounded score
    words = [Trained(one.kind, one.qkv, one.attention, score) for one, score in ((SHA, 62.0), (MUL, 53.8))]
    assert elasticity(words[1], words[0], is_perplexity=True) == pytest.approx(42.32, abs=0.01)


def test_a_row_for_each_kind() -> None:
    rows = quality_table([MHA, SHA, MUL], is_perplexity=False).rows
    assert [row[0] for row in rows] == ["mha", "sha", "mhe_mul"]
    assert rows[0][1:3] == ["21,233,664", "28,311,552"]
    assert [row[4] for row in rows] == ["100.0%", "96.7%", "98.4%"]
    assert rows[1][5] == "-"


def test_forms_beside_the_literal_one() -> None:
    found = [Timed("mhe_mul", "normal", 1.0, 2_000_000), Timed("mhe_mul", "literal", 1.5, 3_000_000)]
    rows = forms_table([*found, Timed("mha", "-", 2.0, 9_000_000)], {"mhe_mul": "normal"}).rows
    assert [list(row) for row in rows] == [
        ["mhe_mul", "normal", "1.000", "1.50x", "2.00", "yes"],
        ["mhe_mul", "literal", "1.500", "1.00x", "3.00", ""],
        ["mha", "-", "2.000", "-", "9.00", "yes"],
    ]


def test_caches_beside_ordinary_heads() -> None:
    rows = writing_table([Writing("mha", 8192, 1.0), Writing("mhe_mul", 1024, 0.5)]).rows
    assert [row[1:3] for row in rows] == [["8,192", "1x less"], ["1,024", "8x less"]]
