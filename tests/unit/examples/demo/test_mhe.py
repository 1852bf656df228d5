"""The demonstration over a few steps of training: two attentions, compiled in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nestforge
import pytest
from nestforge.bucket import Bucket
from nestforge.examples.demo import mhe
from nestforge.examples.demo.figures import mhe_tables
from nestforge.examples.train.mhe.recipe import Recipe, models
from nestforge.examples.train.mhe.runs import Run, Trainer
from support.tiny_compile import board

KINDS = ("sha", "mhe_mul")
RECIPE = Recipe(steps=2, batch=4, window=16, decoder_rate=1e-2, encoder_rate=1e-2, decay=0.1, share=0.25, held_out=8)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Of the models, which lie in folders of their names beside this file's ``stdlib``."""
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
    monkeypatch.setattr(mhe_tables, "BEST", "sha")
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
