"""Engines' references, and the bytes of the weight store that a plan states: of integers, the numbers that they stand
for. Segments: compared at every exit with one uncut pass, shared between depths, kept for a resumed compile."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.engines.engine_references import written_references
from nestforge.compiler.engines.segments import build_segments
from nestforge.compiler.engines.templates import Templates
from nestforge.compiler.graph import store
from nestforge.compiler.graph.encodings import parts_of, split_encoding
from nestforge.compiler.graph.store import read_store, write_store
from nestforge.compiler.parity.cases import few
from nestforge.compiler.planning.levels import levels
from nestforge.compiler.work.staging import Stage
from nestforge.elastic import Submodel
from nestforge.errors import ParityError
from nestforge.exporters.source import ModelSource, open_source
from nestforge.exporters.universal import load_universal
from nestforge.profiles.precision import HALF_ENCODINGS, INT4, PRECISIONS, TRACED, Precision
from nestforge.runtime.inputs.arrays import Arrays
from support.cost_eff_models import save_tiny
from support.derived_engines import rounded
from support.gated_decoders import save_decoder
from support.tiny_compile import BUCKET, board, builder_in, save_tiniest, template_of
from support.tiny_matlm import save_text_matlm
from support.tiny_mixer import save_tiny_mixer
from support.tiny_models import save_tiny_vit

MODELS: dict[str, Callable[[Path], Path]] = {
    "roberta": lambda folder: save_tiniest(folder, "roberta", "ForSequenceClassification", hidden_size=32),  # a head
    "cost_eff": save_tiny,  # exits, whose engines read other heads than the whole ones
    "llama": lambda folder: save_decoder(folder, hidden_size=32),  # tables: rotations and a causal mask
    "matlm": lambda folder: save_text_matlm(folder, hidden_size=32),  # a table that is a product's weight too
    "mixer": lambda folder: save_tiny_mixer(folder, hidden_size=32),  # rows of stacked weights, and routes
    "vit": lambda folder: save_tiny_vit(folder, hidden_size=32),  # a convolution
}
BUCKETS = ["2x16"]  # the mixer takes whole sequences
RUN = [(name, backend) for name, spec in PRECISIONS.items() for backend in spec.backends]


class AnyScale(dict[str, float]):
    """Scales of weights that were not calibrated; sizes do not depend on them."""

    def __missing__(self, weight: str) -> float:
        return 0.1


def ends_of(source: ModelSource) -> list[Submodel]:
    """The smallest level and the universal model."""
    steps = levels(source.spec, None, 8)
    return [steps[0].submodel, steps[-1].submodel]


@pytest.fixture(scope="module", params=MODELS)
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Templates:
    """The templates of a model, in fp32."""
    folder = tmp_path_factory.mktemp(request.param)
    stage = Stage(folder, folder / "work")
    stage.work.mkdir()
    universal = load_universal(open_source(MODELS[request.param](folder / "model")))
    templates = Templates(universal, stage, board(buckets=BUCKETS), scales=AnyScale())
    for key in templates.keys(ends_of(universal.source), templates.profile.buckets):
        templates.get(key)
    return templates


@pytest.mark.parametrize(("precision", "backend"), RUN)
def test_the_plans_bytes_are_the_stores(traced: Templates, precision: Precision, backend: str, tmp_path: Path) -> None:
    source = replace(traced.universal.source, precisions=(precision,))
    known = dict(traced.known) if backend == "onnxruntime" else {k: v for k, v in traced.known.items() if k == k.traced}
    profile = board(precision=precision, backend=backend, buckets=BUCKETS)
    templates = replace(traced, universal=replace(traced.universal, source=source), profile=profile, known=known)
    for key in templates.keys(ends_of(source), profile.buckets):
        templates.get(key)
    files = write_store(templates.universal, templates.weights(), templates.tables(), tmp_path)
    store = read_store(files, source.spec)
    for submodel in ends_of(source):
        read = read_by(templates, submodel)
        stored = sum(store[name].length(submodel) for name in read)
        parts = [part for name in read for part in parts_of(name) if split_encoding(part)[1] in HALF_ENCODINGS]
        widened = 2 * max((store[part].length(submodel) for part in parts), default=0)
        planned = replace(source, encodings=templates.encodings).weight_bytes(submodel, backend)
        assert planned.stored == stored
        assert planned.held == stored + (widened if backend == "onnxruntime" else 0)
        if precision == TRACED:
            assert source.weight_bytes(submodel, backend) == planned, "headers tell all of it"


def read_by(templates: Templates, submodel: Submodel) -> set[str]:
    """The tensors of the store, made of parameters, that engines of ``submodel`` and their segments read."""
    exits = templates.universal.source.exits
    (bucket,) = templates.profile.buckets
    segments = [s.name for s in exits.entry.segments if s.layer <= (submodel.depth or 0)] if exits else []
    parts = [templates.of(submodel, submodel.at(bucket), part) for part in (None, *segments)]
    return {name for template in parts for name in template.weights}


NAME = "encoder.layer.1.intermediate.dense.weight"


@pytest.fixture
def in_4_bits(tmp_path: Path) -> EngineBuilder:
    universal = load_universal(open_source(save_tiniest(tmp_path / "model", hidden_size=32, intermediate_size=64)))
    return builder_in(tmp_path / "stage", universal, template_of(universal), board(precision=["int4"]))


def test_an_engine_of_integers_is_held_against_its_own_numbers(in_4_bits: EngineBuilder) -> None:
    whole = in_4_bits.universal.spec.universal()
    entry, references = in_4_bits.build(whole, BUCKET), in_4_bits.engine_references
    own = references.of(in_4_bits.proofs, entry)
    held = own.of(whole).module.get_parameter(f"model.{NAME}").detach().numpy()
    weight = in_4_bits.universal.parameters()[NAME].numpy()
    assert np.array_equal(held, rounded(weight, NAME + INT4))
    assert references.of(in_4_bits.proofs, entry) is own, "made once"
    assert references.of(in_4_bits.proofs, replace(entry, precision="fp32")) is in_4_bits.references
    on_few = references.on(few).of(in_4_bits.proofs, entry)
    assert on_few.replayed(whole, BUCKET).outputs[0] is own.replayed(whole, BUCKET).outputs[0], "nor passed again"
    with written_references(in_4_bits.bundle, in_4_bits.references) as written:
        again = written.of(in_4_bits.bundle, entry).of(whole).module.get_parameter(f"model.{NAME}").detach().numpy()
        assert np.array_equal(again, held)


def test_how_far_rounded_weights_leave_the_model_is_stated_and_not_judged(in_4_bits: EngineBuilder) -> None:
    """Weights of which 4 bits keep little, as a language model's logits on single tokens."""
    with torch.no_grad():
        for name, parameter in in_4_bits.universal.parameters().items():
            if name.endswith("intermediate.dense.weight"):
                parameter[:, 0] *= 60  # the rest of its block is rounded away, and this has hardly an input
            if "attention.output.LayerNorm" in name:
                parameter[0] /= 1e4
    templates = in_4_bits.templates
    store.write_store(in_4_bits.universal, templates.weights(), templates.tables(), in_4_bits.stage.folder)
    whole = in_4_bits.universal.spec.universal()
    receipt = in_4_bits.build(whole, BUCKET).parity
    assert min(output.min_cosine for output in receipt.outputs) < receipt.min_cosine
    assert "figures are those from the model as it is" in receipt.rule


def test_activations_that_are_rounded_wrongly_are_found(
    in_4_bits: EngineBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the rounding of activations is right, so that the proof without it passes."""
    answers, whole = EngineBuilder.answers, in_4_bits.universal.spec.universal()

    def clipped(found: list[Arrays]) -> list[Arrays]:
        return [{name: np.clip(array, -0.3, 0.3) for name, array in arrays.items()} for arrays in found]

    monkeypatch.setattr(EngineBuilder, "answers", lambda self, *of: clipped(answers(self, *of)))
    with pytest.raises(ParityError, match=r"^engine \S+: output \S+, case \S+: max abs .*no module alone"):
        in_4_bits.build(whole, BUCKET)


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
