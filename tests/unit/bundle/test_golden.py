"""One bundle for each kind of engine still opens and answers as it did when it was written."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import nestforge
import numpy as np
import pytest
from nestforge.bundle.entries.generation_entry import CachedLayer
from nestforge.elastic import Axis
from nestforge.runtime.engines.runner import runner_for
from nestforge.runtime.generation.cache import Cache
from nestforge.runtime.generation.cached_engine import CachedEngine
from nestforge.runtime.model import ElasticModel
from nestforge.runtime.summary import bundle_facts, common_details, submodel_table

GOLDEN = Path(__file__).parents[2] / "golden"
TEXT = "the quick brown fox jumps over the lazy dog"
KINDS = (
    "conditional",
    "decoder",
    "exits",
    "experts",
    "fewer-heads",
    "merged",
    "narrow-heads",
    "precisions",
    "ranges",
    "tasks",
    "tensorrt",
    "texts",
    "windows",
)


# Whose engines are for TensorRT: no host of these tests has that, and their graphs run in ONNX Runtime.
_GRAPHS_ALONE = "tensorrt"


@contextmanager
def _opened(kind: str) -> Iterator[ElasticModel]:
    path = GOLDEN / f"bundle-{kind}"
    if kind != _GRAPHS_ALONE:
        with nestforge.load(path, check="full") as model:
            yield model
        return
    bundle = nestforge.open_bundle(path, check="full")
    assert {engine.backend for engine in bundle.manifest.every_engine} == {"tensorrt"}
    engines = tuple(replace(engine, backend="onnxruntime") for engine in bundle.manifest.engines)
    here = replace(bundle, manifest=replace(bundle.manifest, engines=engines))
    with ElasticModel(here, {engine.id: "packed" for engine in engines}, 1) as model:
        yield model


@pytest.mark.parametrize("kind", KINDS)
def test_a_golden_bundle_answers_as_it_did(kind: str) -> None:
    expected = np.load(GOLDEN / f"bundle-{kind}-answers.npz", allow_pickle=False)
    with _opened(kind) as model:
        for name in expected.files:
            asked, output = name.split("/")
            submodel, _, exits = asked.partition(" ")
            way = float(exits) if exits not in ("", "off") else "off"
            decides = output not in {spec.name for spec in model.bundle.manifest.outputs}
            answer = model(TEXT, submodel=submodel, exits=way, routing=decides)
            if decides:
                np.testing.assert_array_equal(answer.routing[output], expected[name])
            else:
                np.testing.assert_allclose(answer.outputs[output], expected[name], atol=1e-5, rtol=1e-4)


def test_what_a_bundle_says_of_its_exits_and_proofs() -> None:
    bundle = nestforge.open_bundle(GOLDEN / "bundle-exits")
    facts = dict(bundle_facts(bundle.manifest, bundle.build))
    assert facts["exits"] == "after layers 1, 3, 4, 3 classes; entropy <= 0.4, 0.3"
    assert facts["proof of decision"].startswith("4 subjects, ")
    assert "proof of load" in facts
    predicted = {latency.engine: latency.largest.predicted_ms for latency in bundle.build.latencies}
    table = submodel_table(bundle.manifest, bundle.build)
    for entry, row in zip(bundle.manifest.submodels, table.rows, strict=True):
        assert row[3] == f"{predicted[entry.id + '@b1-s16']:.2f}", "of the whole engine, not of a segment"


def test_every_golden_bundle_is_of_the_present_schema() -> None:
    found = {path.name.removeprefix("bundle-") for path in GOLDEN.glob("bundle-*") if path.is_dir()}
    assert found == set(KINDS)
    assert {nestforge.open_bundle(GOLDEN / f"bundle-{kind}").manifest.schema_version for kind in KINDS} == {1}


def test_what_a_bundle_says_of_its_quality() -> None:
    manifest = nestforge.open_bundle(GOLDEN / "bundle-texts").manifest
    assert (manifest.ranking.method, manifest.ranking.samples) == ("taylor", 128)
    whole, small = (manifest.submodel(f"ffn{width}").quality for width in ("32-heads2", "16-heads1"))
    assert whole.figures == {"mean_cosine": 1.0, "recall_at_10": 1.0}
    assert 0 < small.figures["mean_cosine"] < 1
    assert small.figures.keys() == whole.figures.keys()
    assert (small.samples, small.positions, small.data_sha256) == (whole.samples, whole.positions, whole.data_sha256)


def test_heads_of_a_cache_and_of_a_prompt_are_narrow_each_for_itself() -> None:
    """A translation model with layout width_first, whose decoder has one layer; as they wrote then."""
    with nestforge.load(GOLDEN / "bundle-narrow-heads") as model:
        entry = model.bundle.manifest.generation
        assert {(engine.segment, engine.cache_layout) for engine in entry.every_engine} == {
            ("cached", (None, (8,), None, (4,))),
            ("encoder", (None, None, None, (4,))),
            ("cached", (None, None, None, None)),
            ("encoder", (None, None, None, None)),
        }
        for submodel, tokens in {
            "ffn48-head_width16-cross_head_width16": (39, 39, 25, 33, 39, 39),
            "ffn24-head_width16x1_8x1-cross_head_width4": (25, 39, 25, 25, 25, 25),
        }.items():
            assert model.generate(TEXT, max_tokens=6, stop=[], submodel=submodel).rows[0].tokens == tokens


def test_what_a_bundle_says_of_its_routing() -> None:
    manifest = nestforge.open_bundle(GOLDEN / "bundle-experts").manifest
    assert common_details(manifest)["capacity rounding"] == "half_even"
    shapes = {engine.submodel: [entry.shape for entry in engine.routing or ()] for engine in manifest.engines}
    assert shapes == {
        "moe.capacity_factor50-moe.group_size4096-moe.experts2": [(1, 2, 2)] * 2,
        "moe.capacity_factor50-moe.group_size4096-moe.experts4": [(1, 4, 2)] * 2,
        "moe.capacity_factor100-moe.group_size4096-moe.experts4": [(1, 4, 4)] * 2,
    }
    for engine in manifest.engines:
        assert engine.variants.keys() >= {"moe.dispatch", "moe.combine"}
        for judged in engine.parity.routing or ():
            assert judged.worst_score_gap <= engine.parity.atol
            assert judged.shares.keys() == {"tokens_dropped", "slots_used", "mean_gate"}


def test_what_a_bundle_says_of_tokens_that_an_encoder_selects_of_a_prompt() -> None:
    entry = nestforge.open_bundle(GOLDEN / "bundle-conditional").manifest.generation
    routed = {engine.submodel: [one.shape for one in engine.routing or ()] for engine in entry.encoder.engines}
    assert routed == {"ffn32-coda.reduction1": [], "ffn32-coda.reduction3": [(1, 8)]}
    with nestforge.load(GOLDEN / "bundle-conditional") as model:
        written = model.generate(TEXT, max_tokens=6, stop=[], submodel="ffn32-coda.reduction3").rows[0]
    assert written.tokens == (5,) * 6


def test_what_a_bundle_says_of_its_precisions() -> None:
    bundle = nestforge.open_bundle(GOLDEN / "bundle-precisions")
    manifest = bundle.manifest
    assert dict(bundle_facts(manifest, bundle.build))["precision"] == "int8-dynamic, fp32"
    assert {engine.submodel: engine.precision for engine in manifest.engines} == {
        "ffn32-heads1": "fp32",
        "ffn32-heads1.int8-dynamic": "int8-dynamic",
        "ffn64-heads2": "fp32",
        "ffn64-heads2.int8-dynamic": "int8-dynamic",
    }
    whole, small = manifest.submodel("100%"), manifest.submodel("100%.int8-dynamic")
    assert (whole.id, small.id) == ("ffn64-heads2", "ffn64-heads2.int8-dynamic")
    assert manifest.submodel("ffn64.int8-dynamic") == small, "what an id leaves out has its full size"
    assert manifest.submodel("100%.fp32") == whole, "a label may say the highest precision, as an id may"
    assert small.weight_bytes < whole.weight_bytes


def test_what_a_bundle_says_of_texts_and_of_its_order() -> None:
    manifest = nestforge.open_bundle(GOLDEN / "bundle-texts").manifest
    text = manifest.text
    assert (text.lowercase, text.max_tokens, text.default_prompt, text.pooled) == (True, 14, "query", "pooling_mask")
    assert text.prompts == {"query": "time budget ", "passage": "a "}
    assert manifest.ranking.order_file == "ranking.safetensors"


def test_what_a_bundle_says_of_its_caches() -> None:
    entry = nestforge.open_bundle(GOLDEN / "bundle-decoder").manifest.generation
    assert (entry.end_ids, entry.begin_id, entry.positions, entry.layers) == ((2,), 1, 40, (CachedLayer(2, 8),) * 2)
    entry = nestforge.open_bundle(GOLDEN / "bundle-fewer-heads").manifest.generation
    assert entry.layers == (CachedLayer(4, 8),) * 2
    assert [engine.kind.cache_heads for engine in entry.engines] == [(2, 2), (1, 4), None]
    entry = nestforge.open_bundle(GOLDEN / "bundle-windows").manifest.generation
    assert entry.layers == (CachedLayer(2, 8, window=8), CachedLayer(2, 8))
    entry = nestforge.open_bundle(GOLDEN / "bundle-tensorrt").manifest.generation
    assert [(engine.submodel, engine.capacity, engine.kind.cache_heads) for engine in entry.engines] == [
        ("ffn16-heads2", 24, (2,)),
        ("ffn16-heads2", 48, (2,)),
        ("ffn32-heads4", 24, None),
        ("ffn32-heads4", 48, None),
    ]


@pytest.mark.parametrize("kind", ["decoder", "fewer-heads", "windows", "tensorrt"])
def test_engines_of_a_bundle_that_generates_continue_texts_as_its_whole_ones_answer(kind: str) -> None:
    entry = nestforge.open_bundle(GOLDEN / f"bundle-{kind}").manifest.generation
    with _opened(kind) as model:
        for engine in (replace(each, backend="onnxruntime") for each in entry.engines):
            ids = np.array([[7, 3, 11, 5, 2]])
            expected = model({"input_ids": ids}, submodel=engine.submodel).outputs["logits"][0]
            own = entry.of(engine)
            capacity = engine.capacity or 8
            cache = Cache.empty(own.layers, rows=1, capacity=capacity, longest_run=entry.longest_run)
            with runner_for(model.bundle, engine, "packed", threads=1) as runner:
                cached = CachedEngine(runner, engine, own, cache)
                found = [*cached.extend(0, ids[0, :3], 0, [0, 1, 2])]
                found += [cached.step([ids[0, at]], [at])[0].copy() for at in (3, 4)]
            np.testing.assert_allclose(np.stack(found), expected, atol=1e-5, rtol=1e-4)


def test_a_bundle_of_an_encoder_decoder_reads_a_prompt_once_and_answers_as_its_whole_engines() -> None:
    with nestforge.load(GOLDEN / "bundle-narrow-heads") as model:
        entry = model.bundle.manifest.generation
        assert (entry.encoder.start_id, entry.encoder.positions, len(entry.layers)) == (1, 24, 1)
        prompt = model.generate.tokens(TEXT)
        for engine in entry.engines:
            row = model.generate(TEXT, submodel=engine.submodel, max_tokens=8).rows[0]
            decoder = np.full((1, len(prompt)), entry.encoder.start_id)
            decoder[0, 1 : len(row.tokens)] = row.tokens[:-1]
            feeds = {
                "input_ids": np.array([prompt]),
                "attention_mask": np.ones((1, len(prompt)), np.int64),
                "decoder_input_ids": decoder,
            }
            logits = model(feeds, submodel=engine.submodel).outputs["logits"][0]
            assert logits.argmax(axis=-1)[: len(row.tokens)].tolist() == list(row.tokens)


def test_tasks_of_a_bundle_answer_as_they_did() -> None:
    expected = np.load(GOLDEN / "bundle-tasks-task-answers.npz", allow_pickle=False)
    with nestforge.load(GOLDEN / "bundle-tasks") as model:
        assert {name: task.submodels for name, task in model.tasks.entries.items()} == {
            "both": ("ffn24-coda.reduction1", "ffn24-coda.reduction4"),
            "quarter": ("ffn24-coda.reduction4",),
        }
        for name in expected.files:
            task, submodel = name.split("/")
            found = model(TEXT, submodel=submodel, task=task)
            np.testing.assert_allclose(found["logits"], expected[name], atol=1e-5, rtol=1e-4)
        base = model(TEXT, submodel="ffn24-coda.reduction4")
        assert not np.allclose(base["logits"], expected["quarter/ffn24-coda.reduction4"], atol=1e-2)


def test_tasks_merged_into_weights_answer_as_they_did() -> None:
    expected = np.load(GOLDEN / "bundle-merged-task-answers.npz", allow_pickle=False)
    for merge in ((), ("a",)):
        with nestforge.load(GOLDEN / "bundle-merged", merge=merge) as model:
            for name in expected.files:
                submodel, output = name.split("/")
                found = model(TEXT, submodel=submodel, task="a")
                assert ("merged" in found.engine, found.residency) == (bool(merge), "packed")
                np.testing.assert_allclose(found[output], expected[name], atol=1e-5, rtol=1e-4)


def test_what_a_bundle_says_of_reductions() -> None:
    """Choices that fall: the largest reduction keeps least, and the whole model has the least."""
    manifest = nestforge.open_bundle(GOLDEN / "bundle-conditional").manifest
    axis = manifest.axes[-1]
    assert (axis, axis.falls) == (Axis("coda.reduction", 1, (3, 1)), True)
    assert [axis.share(choice) for choice in (3, 1)] == [1 / 3, 1.0]
    assert [entry.id for entry in manifest.largest_first] == [f"ffn32-coda.reduction{r}" for r in (1, 3)]
    selected = {engine.submodel: (engine.metadata or {})["tokens selected"] for engine in manifest.engines}
    assert selected == {"ffn32-coda.reduction1": 12, "ffn32-coda.reduction3": 4}
