from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nestforge
import pytest
from nestforge.bundle.manifest import Manifest
from nestforge.runtime.description import described


def test_a_loaded_model_describes_itself(tiny_bundle: Path) -> None:
    with nestforge.load(tiny_bundle, threads=1) as model:
        assert [(one.id, one.labels, one.precision) for one in model.submodels] == [
            ("ffn32", ("XL",), "fp32"),
            ("ffn16", ("S",), "fp32"),
        ]
        largest = model.submodels[0]
        assert (largest.parameters, largest.weight_mb, dict(largest.figures)) == (1328, 1328 * 4 / 1e6, {})
        assert [(one.name, one.submodel, one.limits.latency_ms) for one in model.budgets] == [("edge", "ffn16", 1.0)]
        assert [(one.name, one.dtype, one.dims) for one in model.inputs] == [
            ("input_ids", "int64", ("batch", "sequence")),
            ("attention_mask", "int64", ("batch", "sequence")),
        ]
        assert [one.name for one in model.outputs] == ["hidden", "total"]
        assert model.precisions == ("fp32",)
        shown = model._repr_html_()
    for text in ("ElasticModel(", "hidden float32 [batch, sequence, 16]", "budget edge", "<td>ffn16</td>"):
        assert text in shown


def test_only_what_may_run_here_is_described(manifest: Manifest) -> None:
    assert [one.id for one in described(manifest, {"ffn16@b1-s8"})] == ["ffn16"]
    assert described(manifest, ()) == ()


@pytest.mark.parametrize("rows", [1, 5])
def test_an_answer_in_a_notebook(own_bundle: Path, feeds: Callable[..., Any], edit_manifest: Any, rows: int) -> None:
    edit_manifest(own_bundle, lambda data: data["budgets"][0].update(reason="<b>fast</b>"))
    with nestforge.load(own_bundle, threads=1) as model:
        shown = model(feeds(rows, 8), budget="edge")._repr_html_()
        assert "<b>" not in model._repr_html_()
    assert "Answer of ffn16" in shown
    assert "budget edge: &lt;b&gt;fast&lt;/b&gt;" in shown
    assert f"<tr><td>total</td><td>float32</td><td>{rows}x16</td></tr>" in shown
    assert ("<th>run 5</th>" in shown) == (rows == 5)
