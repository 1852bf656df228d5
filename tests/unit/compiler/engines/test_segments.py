"""Segments: compared at every exit with one uncut pass, shared between depths, kept for a resumed compile."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.engines.segments import build_segments
from nestforge.errors import ParityError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.cost_eff_models import save_tiny
from support.tiny_compile import BUCKET, board, builder_in, template_of


@pytest.fixture
def multi_exit(tmp_path: Path) -> EngineBuilder:
    universal = load_universal(open_source(save_tiny(tmp_path / "m")))
    return builder_in(tmp_path / "stage", universal, template_of(universal), board())


def test_one_engine_per_segment_with_the_receipt_of_its_own_outputs(multi_exit: EngineBuilder) -> None:
    universal = multi_exit.universal.spec.universal()
    engines = build_segments(multi_exit, universal, BUCKET)
    assert [engine.segment for engine in engines] == ["to1", "to3", "to4"]
    assert [engine.id for engine in engines][1] == f"{universal.id}.to3@{BUCKET.label}"
    outputs = [[output.name for output in engine.parity.outputs] for engine in engines if engine.parity]
    assert outputs == [["next_state", "logits", "entropy"]] * 2 + [["logits", "entropy"]]
    assert all(
        engine.parity and engine.parity.cases == ("random-0", "random-1", "whole", "padded") for engine in engines
    )


def test_a_shorter_submodel_has_the_first_files_of_the_deepest(multi_exit: EngineBuilder) -> None:
    spec = multi_exit.universal.spec
    deepest, shorter = (build_segments(multi_exit, spec.parse(f"depth{depth}"), BUCKET) for depth in (4, 3))
    assert [engine.file for engine in shorter] == [engine.file for engine in deepest[:2]]
    assert {engine.submodel for engine in shorter} == {spec.parse("depth3").id}


def test_finished_segments_are_kept_and_lost_ones_built_again(multi_exit: EngineBuilder) -> None:
    universal = multi_exit.universal.spec.universal()
    first = build_segments(multi_exit, universal, BUCKET)
    path = multi_exit.stage.folder / first[1].file
    written = path.read_bytes()
    stamps = [(multi_exit.stage.folder / engine.file).stat().st_mtime_ns for engine in first]
    assert build_segments(multi_exit, universal, BUCKET) == first
    assert [(multi_exit.stage.folder / engine.file).stat().st_mtime_ns for engine in first] == stamps
    path.unlink()
    assert build_segments(multi_exit, universal, BUCKET) == first
    assert path.read_bytes() == written


def test_a_segment_that_differs_stops_the_build_and_names_the_module(multi_exit: EngineBuilder) -> None:
    """The store holds what the compile ranked; a weight of layer 2 that changes afterwards is a wrong engine."""
    layer = multi_exit.universal.module.model.encoder.layer[2]
    layer.output.dense.bias.data[0] += 0.5
    with pytest.raises(
        ParityError, match=r"\.to3@b2-s8: output next_state.*first to diverge: encoder\.layer\.2\.output"
    ):
        build_segments(multi_exit, multi_exit.universal.spec.universal(), BUCKET)


def test_a_wrong_entropy_is_found_even_where_logits_are_right(
    multi_exit: EngineBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = EngineBuilder.run

    def doubled(self: EngineBuilder, engine: Any, feeds: Any) -> list[Any]:
        return [{**found, "entropy": 2 * found["entropy"]} for found in run(self, engine, feeds)]

    monkeypatch.setattr(EngineBuilder, "run", doubled)
    with pytest.raises(ParityError, match=r"\.to1@b2-s8: output entropy"):
        build_segments(multi_exit, multi_exit.universal.spec.universal(), BUCKET)


def test_a_model_without_exits_has_no_segments(builder: EngineBuilder) -> None:
    assert build_segments(builder, builder.universal.spec.universal(), BUCKET) == ()


def test_what_cannot_be_sliced_is_traced_segment_by_segment(multi_exit: EngineBuilder) -> None:
    spec, templates = multi_exit.universal.spec, multi_exit.templates
    for key in templates.keys([spec.universal()], [BUCKET]):
        templates.known[key] = replace(templates.get(key), slice_problem="node x (CumSum): no rule")
    engines = build_segments(multi_exit, spec.parse("depth4-ffn16_32_40"), BUCKET)
    assert {engine.emitted for engine in engines} == {"traced"}
    assert all(engine.slice_problem == "node x (CumSum): no rule" for engine in engines)
