"""The demonstration over a few steps of training: two attentions, compiled in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nestforge
import pytest
from nestforge.bucket import Bucket
from nestforge.examples.mhe import __main__ as mhe
from nestforge.examples.mhe.__main__ import (
    Timed,
    Trained,
    Writing,
    elasticity,
    forms_table,
    quality_table,
    retained,
    writing_table,
)
from nestforge.examples.mhe.fit import Recipe, Run, Trainer, models
from support.tiny_compile import board

KINDS = ("sha", "mhe_mul")
RECIPE = Recipe(steps=2, batch=4, window=16, decoder_rate=1e-2, encoder_rate=1e-2, decay=0.1, share=0.25, held_out=8)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """For the models, which lie in folders of their names beside this file's ``stdlib``."""
    folder = tmp_path_factory.mktemp("demo")
    stdlib = folder / "stdlib"
    stdlib.mkdir()
    for number in range(40):
        lines = (f"def function_{number}_{line}(argument_one, argument_two):" for line in range(8))
        (stdlib / f"module{number}.py").write_text("\n    pass\n\n".join(lines))
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    configs = models(RECIPE.window, **shape)
    names = [f"{side}-{kind}" for kind in KINDS for side in ("encoder", "decoder")]
    trainer = Trainer(RECIPE, stdlib)
    return {"folder": folder, **{name: trainer(Run(name, configs[name], folder / name)) for name in names}}


def _compile(model: Path, bundle: Path, *options: str) -> bool:
    variants = {"attention": options[-1].partition("=")[2]} if "--variant" in options else {}
    device = board(budgets={"full": {}}, buckets=["1x16"], variants=variants)
    generate = "--generate" in options
    nestforge.compile(model, device, bundle, measure=False, include="budgets", generate=generate, levels={"ffn": (1,)})
    return True


def test_every_table(monkeypatch: pytest.MonkeyPatch, records: Mapping[str, Any]) -> None:
    monkeypatch.setattr(mhe, "FOLDER", records["folder"])
    monkeypatch.setattr(mhe, "KINDS", KINDS)
    monkeypatch.setattr(mhe, "FORMS", ("literal",))
    monkeypatch.setattr(mhe, "BEST", "sha")
    monkeypatch.setattr(mhe, "BUCKET", Bucket(1, 16))
    monkeypatch.setattr(mhe, "compile_once", _compile)
    monkeypatch.setattr(mhe, "host_profile", lambda: board(variants={"attention": "literal"}))
    monkeypatch.setattr(mhe, "_PROMPT", "def f")
    monkeypatch.setattr(mhe, "_TOKENS", 4)
    encoders, decoders, forms, writing = mhe.tables(records).values()
    assert [row[0] for row in encoders.rows] == [row[0] for row in decoders.rows] == list(KINDS)
    # Queries, keys and values of one layer: 3 x 16 x 8, and tables of 3 x 2 x 8; output 16 x 16.
    assert [list(row[1:3]) for row in encoders.rows] == [["384", "640"], ["432", "688"]]
    assert encoders.rows[0][4] == "100.0%"
    assert [[*row[:2], row[5]] for row in forms.rows] == [["sha", "-", "yes"], ["mhe_mul", "literal", "yes"]]
    assert forms.rows[1][3] == "1.00x"
    # Keys and values of one head of 8 that all share, in float32.
    assert [list(row[1:3]) for row in writing.rows] == [["64", "1x less"], ["64", "1x less"]]


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
