"""The bytes that a plan states are those of the weight store, once it is known in which encodings engines read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from nestforge.compiler.engines.templates import Templates
from nestforge.compiler.graph.encodings import parts_of, split_encoding
from nestforge.compiler.graph.store import read_store, write_store
from nestforge.compiler.planning.levels import levels
from nestforge.compiler.work.staging import Stage
from nestforge.elastic import Submodel
from nestforge.exporters.source import ModelSource, open_source
from nestforge.exporters.universal import load_universal
from nestforge.profiles.precision import HALF_ENCODINGS, PRECISIONS, TRACED, Precision
from support.cost_eff_models import save_tiny
from support.gated_decoders import save_decoder
from support.tiny_compile import board, save_tiniest
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
