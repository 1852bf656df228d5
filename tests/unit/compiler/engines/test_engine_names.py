"""What engines and their files are called: parts told apart, and names that a file may have."""

from __future__ import annotations

from pathlib import Path

from nestforge.bucket import Bucket
from nestforge.bundle.read_manifest import is_plain_name
from nestforge.compiler.engines.engine_names import engine_names, short
from nestforge.elastic import Submodel
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.tiny_compile import save_tiniest


def test_parts_stand_before_the_bucket(tmp_path: Path) -> None:
    submodel: Submodel = open_source(save_tiniest(tmp_path / "model")).spec.universal()
    at = submodel.id
    assert engine_names(submodel, (), Bucket(1, 8)) == (f"{at}@b1-s8", f"{at}.b1-s8")
    assert engine_names(submodel, ("merged", "cached"), Bucket(1, 8))[0] == f"{at}.merged.cached@b1-s8"


def test_ids_too_long_for_a_file_name(tmp_path: Path) -> None:
    deep = load_universal(
        open_source(save_tiniest(tmp_path / "deep", num_hidden_layers=30, hidden_size=4, intermediate_size=400))
    )
    widths = [100 + 7 * layer for layer in range(30)]
    one = deep.spec.from_kinds({"ffn": widths, "heads": [1] * 15 + [2] * 15})
    other = deep.spec.from_kinds({"ffn": [*widths[:-1], 400], "heads": [1] * 15 + [2] * 15})
    names = {short(submodel.id) for submodel in (one, other)}
    assert len(names) == 2
    assert all(len(name) < 140 and is_plain_name(f"{name}.b1024-s1024.onnx") for name in names)
    assert short("ffn8-heads1") == "ffn8-heads1"
