"""Exits, generation and tasks in a manifest, and lists of tasks: accepted, or refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.check_parts import generation_problems
from nestforge.bundle.device_files.task_index import read_tasks
from nestforge.bundle.entries.engine_entry import Decode, Encoder, EngineEntry, Whole
from nestforge.bundle.entries.generation_entry import (
    CachedLayer,
    EncoderEntry,
    GenerationEntry,
)
from nestforge.bundle.entries.task_entry import TaskTensor
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.bundle.files import sealed_json
from nestforge.bundle.manifest import TASKS_NAME, FileEntry, Manifest
from nestforge.bundle.open_bundle import open_bundle
from nestforge.bundle.read_manifest import read_manifest
from nestforge.elastic import Axis, ElasticSpec
from nestforge.errors import BundleFormatError
from nestforge.strict import unstructure
from support.exit_bundles import exits_manifest

GOLDEN = Path(__file__).parents[2] / "golden"
TASKS = GOLDEN / "bundle-tasks"


@pytest.fixture
def data() -> dict[str, Any]:
    """One bucket; engines: depth2, its to1 and to2, depth4, its to1, to2 and to4."""
    manifest = exits_manifest([Bucket(1, 8)])
    names = sorted({engine.file for engine in manifest.engines})
    return dict(unstructure(replace(manifest, files=tuple(FileEntry(name, 1, "a" * 64) for name in names))))


def read(data: object) -> Manifest:
    return read_manifest(json.dumps(data).encode(), "m")


def test_reads_back_what_was_written(data: dict[str, Any]) -> None:
    manifest = read(data)
    assert unstructure(manifest) == data
    segment = manifest.exits.segments[1]
    assert manifest.interface_of(manifest.engines[2]) == (segment.inputs, segment.outputs)


def without_exits(data: dict[str, Any]) -> None:
    """A model without an entropy: whole engines."""
    data.pop("exits")
    data["engines"] = [engine for engine in data["engines"] if engine["kind"]["name"] == "whole"]


def test_a_depth_without_exits_is_read(data: dict[str, Any]) -> None:
    without_exits(data)
    assert read(data).exits is None


def segment(index: int, **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["exits"]["segments"][index].update(changes)


def engine(index: int, **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["engines"][index].update(changes)


def spec(index: int, kind: str, number: int, **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["exits"]["segments"][index][kind][number].update(changes)


def exits(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["exits"].update(changes)


def no_depth(data: dict[str, Any]) -> None:
    data["axes"] = [{"name": "ffn", "size": 4}]
    for entry, width in zip(data["submodels"], (2, 4), strict=True):
        entry.update(id=f"ffn{width}", values={"ffn": [width]})
    for each in data["engines"]:
        each["submodel"] = each["submodel"].replace("depth", "ffn")
    for budget in data["budgets"]:
        budget["submodel"] = budget["submodel"].replace("depth", "ffn")


Edit = Callable[[dict[str, Any]], object]
REFUSED: list[tuple[str, Edit, str]] = [
    (
        "choices fall",
        lambda d: d["axes"][0].update(choices=[2, 1, 4]),
        "axis depth: choices [2, 1, 4]; expected rising",
    ),
    ("choices end early", lambda d: d["axes"][0].update(choices=[1, 2]), "axis depth: choices [1, 2]; expected rising"),
    ("no choice", lambda d: d["axes"][0].update(choices=[]), "axis depth: choices []; expected rising"),
    ("choice of 0", lambda d: d["axes"][0].update(choices=[0, 4]), "axis depth: choices [0, 4]; expected rising"),
    (
        "depth off",
        lambda d: d["submodels"][0].update(values={"depth": [3]}),
        "axis depth: expected one of 1, 2, 4, got 3",
    ),
    ("no depth axis", no_depth, "axis depth has []"),
    ("choice without exit", lambda d: d["axes"][0].update(choices=[1, 2, 3, 4]), "axis depth has [1, 2, 3, 4]"),
    ("layers fall", segment(0, layer=3), "exits: segments end at layers [3, 2, 4]; expected at least two, rising"),
    (
        "one segment",
        lambda d: d["exits"].update(segments=d["exits"]["segments"][:1]),
        "layers [1]; expected at least two",
    ),
    ("other end", segment(2, layer=5), "exits: segments end at layers [1, 2, 5], axis depth has [1, 2, 4]"),
    (
        "same name",
        segment(1, name="to1"),
        "exits: segments are named ['to1', 'to1', 'to4']; expected names that differ",
    ),
    ("thresholds", lambda d: d["exits"]["gate"].update(thresholds=[0.1]), "exits: 1 thresholds, expected 2"),
    ("threshold NaN", lambda d: d["exits"]["gate"].update(thresholds=["x", 1]), "thresholds[0]: expected a number"),
    ("compare", lambda d: d["exits"]["gate"].update(compare=">"), "compare"),
    (
        "logits",
        exits(logits="scores"),
        "outputs are logits float32 [batch, 3], entropy float32 [batch]; expected those",
    ),
    ("one class", exits(classes=1), "exits: classes: expected at least 2, got 1"),
    ("classes", exits(classes=4), "outputs are logits float32 [batch, 3], entropy float32 [batch]; expected those of"),
    ("state", exits(state_out="state"), "exits: 'state' is not an output [batch, sequence, H] of segment to1"),
    (
        "state dims",
        spec(0, "outputs", 0, dims=["batch", 4]),
        "exits: 'next_state' is not an output [batch, sequence, H]",
    ),
    (
        "state in",
        exits(state_in="hidden"),
        "segment to2: inputs are state float32 [batch, sequence, 4], attention_mask",
    ),
    ("mask", exits(mask="state"), "exits: mask 'state' is not an input of whole numbers [batch, sequence]"),
    ("state width", spec(1, "inputs", 0, dims=["batch", "sequence", 5]), "segment to2: inputs are state float32"),
    ("first inputs", segment(0, inputs=[]), "segment to1: inputs are ; expected input_ids int64 [batch, sequence]"),
    ("entropy dtype", spec(1, "outputs", 2, dtype="float16"), "segment to2: outputs are next_state float32"),
    (
        "last has state",
        lambda d: d["exits"]["segments"][2].update(outputs=d["exits"]["segments"][0]["outputs"]),
        "segment to4: outputs",
    ),
    ("bad dim", spec(1, "inputs", 0, dims=["batch", "steps", 4]), "tensor state: dims ['batch', 'steps', 4]; expected"),
    (
        "input order",
        lambda d: d["inputs"][0].update(dims=["sequence", "batch"]),
        "with exits, expected [batch, sequence",
    ),
    (
        "unknown segment",
        engine(1, kind={"name": "segment", "part": "to3"}),
        "engine depth2.to1@b1-s8: segment 'to3' is not in this manifest",
    ),
    (
        "too deep",
        engine(2, kind={"name": "segment", "part": "to4"}, file="to4.b1-s8.onnx", flops=1600, weight_bytes=32),
        "submodel depth2 ends before segment to4",
    ),
    ("segment missing", lambda d: d["engines"].pop(5), "submodel depth4 at b1-s8: has segments, but no to2"),
    (
        "segment without bytes",
        lambda d: d["engines"][6].pop("weight_bytes"),
        "engine depth4.to4@b1-s8: a segment without weight_bytes",
    ),
    (
        "shared file",
        engine(4, flops=1),
        "engine depth4.to1@b1-s8: differs from another engine of its file to1.b1-s8.onnx",
    ),
    ("shared bytes", engine(4, private_bytes=1), "differs from another engine of its file to1.b1-s8.onnx in more than"),
    (
        "same place",
        engine(5, kind={"name": "segment", "part": "to1"}, file="to1.b1-s8.onnx"),
        "engine for 'depth4, segment to1 at b1-s8, onnxruntime' stands twice",
    ),
    (
        "range for TensorRT",
        engine(0, backend="tensorrt", bucket={"batch": 1, "sequence": 8, "min_sequence": 1}),
        "engine depth2@b1-s8: a range, which engines for tensorrt of a model with exits have not",
    ),
    ("no exits", lambda d: d.pop("exits"), "engine depth2.to1@b1-s8: segment 'to1', but this manifest has no exits"),
]


@pytest.mark.parametrize(("edit", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refuses(data: dict[str, Any], edit: Edit, message: str) -> None:
    edit(data)
    with pytest.raises(BundleFormatError) as error:
        read(data)
    assert message in str(error.value)
    assert str(error.value).startswith("m: ") or "m." in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_of_two_whole_engines_is_refused_too(data: dict[str, Any]) -> None:
    without_exits(data)
    data["engines"][1]["file"] = data["engines"][0]["file"]
    with pytest.raises(BundleFormatError, match=r"engine depth4@b1-s8: differs from another engine of its file depth2"):
        read(data)


ENGINE = EngineEntry(
    id="ffn8.cached@b1_64-s1_40",
    submodel="ffn8",
    bucket=Bucket(64, 40, 1, 1),
    backend="onnxruntime",
    file="ffn8.onnx",
    emitted="sliced",
    private_bytes=0,
    flops=1,
    moved_bytes=1,
    activation_bytes=1,
    kind=Decode(),
    weight_bytes=1,
)
ENTRY = GenerationEntry(48, (CachedLayer(2, 8),), 40, (2,), (ENGINE,), begin_id=1, chat_template="chat.jinja")

READER = replace(ENGINE, id="ffn8.encoder@b1-s1_40", kind=Encoder(), bucket=Bucket(1, 40, None, 1))
ENCODERS = EncoderEntry(0, 40, (READER,))


def decoding(**stated: Any) -> GenerationEntry:
    return replace(ENTRY, engines=(replace(ENGINE, kind=Decode(**stated)),))


def behind(encoder: EncoderEntry) -> GenerationEntry:
    return replace(ENTRY, encoder=encoder)


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    found = open_bundle(GOLDEN / "bundle-ranges").manifest
    return replace(found, files=(*found.files, FileEntry("chat.jinja", 1, "0" * 64)))


def problems(manifest: Manifest, entry: GenerationEntry) -> list[str]:
    return list(generation_problems(replace(manifest, generation=entry)))


def test_a_sound_entry_has_none(manifest: Manifest) -> None:
    assert problems(manifest, ENTRY) == problems(manifest, behind(ENCODERS)) == []
    of_sizes = [
        replace(ENGINE, id=f"ffn8.cached{size}", backend="tensorrt", kind=Decode(capacity=size)) for size in (39, 40)
    ]
    short = replace(of_sizes[0], bucket=Bucket(64, 39, 1, 1))
    reader = replace(READER, backend="tensorrt")
    of_plans = replace(behind(replace(ENCODERS, engines=(reader,))), engines=(short, of_sizes[1]))
    assert problems(manifest, of_plans) == [], "one encoder for the engines of all capacities"
    assert list(generation_problems(manifest)) == []


REFUSED_GENERATION = {
    "no layers": (replace(ENTRY, layers=()), "generation: 0 layers; expected 1..4096"),
    "no engines": (replace(ENTRY, engines=()), "generation: expected at least one engine"),
    "end beyond": (replace(ENTRY, end_ids=(48,)), "end_ids [48]; expected numbers below the vocabulary of 48"),
    "begin beyond": (replace(ENTRY, begin_id=50), "begin_id [50]; expected numbers below the vocabulary of 48"),
    "no template": (replace(ENTRY, chat_template="other.jinja"), "file 'other.jinja' is not among the files"),
    "capacity": (
        decoding(capacity=40),
        "capacity 40; engines for tensorrt have one, others none",
    ),
    "no capacity": (
        replace(ENTRY, engines=(replace(ENGINE, backend="tensorrt"),)),
        "capacity None; engines for tensorrt have one, others none",
    ),
    "small": (
        replace(ENTRY, engines=(replace(ENGINE, backend="tensorrt", kind=Decode(capacity=39)),)),
        "capacity 39; expected 40, its new tokens, to 40, the positions",
    ),
    "two of one size": (
        replace(ENTRY, engines=(replace(ENGINE, backend="tensorrt", kind=Decode(capacity=40)),) * 2),
        "submodel ffn8 has several engines at capacity 40; expected one",
    ),
    "heads": (
        decoding(cache_heads=(3,)),
        "cache_heads [3]; expected 1 to [2]",
    ),
    "sizes": (
        decoding(cache_sizes=(9,)),
        "cache_sizes [9]; expected 1 to [8]",
    ),
    "no prompt": (
        decoding(source_heads=(1,)),
        "source_heads, of a model without an",
    ),
    "layers of heads": (
        decoding(cache_heads=(1, 1)),
        "cache_heads [1, 1]; expected",
    ),
    "huge": (replace(ENTRY, positions=2**30), "layer 0 keeps more than 2147483648 numbers"),
    "segment": (
        replace(ENTRY, engines=(replace(ENGINE, kind=Whole()),)),
        "kind 'whole'; engines that generate have 'decode'",
    ),
    "bucket": (
        replace(ENTRY, engines=(replace(ENGINE, bucket=Bucket(1, 40, None, 2)),)),
        "bucket 1x2..40; expected one that begins with 1 row of 1 token",
    ),
    "long": (replace(ENTRY, positions=39), "40 new tokens, more than the 39 positions"),
    "weights": (replace(ENTRY, engines=(replace(ENGINE, weight_bytes=None),)), "without weight_bytes"),
    "many numbers": (replace(ENTRY, layers=(CachedLayer(2**12, 2**9),) * 3), "more than 4194304"),
    "two": (replace(ENTRY, engines=(ENGINE, replace(ENGINE, id="other"))), "submodel ffn8 has several engines"),
    "start beyond": (
        behind(replace(ENCODERS, start_id=48)),
        "start_id 48; expected a number below the vocabulary",
    ),
    "first beyond": (behind(replace(ENCODERS, first_id=48)), "first_id 48; expected a number below the vocabulary"),
    "last beyond": (behind(replace(ENCODERS, last_id=50)), "last_id 50; expected a number below the vocabulary"),
    "no encoder": (behind(replace(ENCODERS, engines=())), "expected an encoder for each submodel that generates"),
    "encoder's segment": (
        behind(replace(ENCODERS, engines=(replace(READER, kind=Decode()),))),
        "kind 'decode'; engines that read a prompt have 'encoder'",
    ),
    "encoder's bucket": (
        behind(replace(ENCODERS, engines=(replace(READER, bucket=Bucket(2, 40, None, 1)),))),
        "bucket 2x1..40; expected one row that begins with 1 token",
    ),
    "encoder's backend": (
        behind(replace(ENCODERS, engines=(replace(READER, backend="tensorrt"),))),
        "backend tensorrt; expected that of the engines which read what it makes",
    ),
    "encoder's positions": (behind(replace(ENCODERS, positions=41)), "takes 40 tokens; expected 41"),
    "huge prompts": (behind(replace(ENCODERS, positions=2**30)), "an encoder returns more than 2147483648 numbers"),
    "encoder's weights": (
        behind(replace(ENCODERS, engines=(replace(READER, weight_bytes=None),))),
        "ffn8.encoder@b1-s1_40: an engine that generates without weight_bytes",
    ),
    "begins beyond": (behind(replace(ENCODERS, begin_ids=(0, 48))), "begin_ids 48; expected a number below the vocab"),
    "another input": (
        behind(replace(ENCODERS, input=TensorSpec("features", "float32", ("batch", 8)))),
        "input 'features' of an encoder; expected one of the inputs, float32, of one shape",
    ),
    "bucket of arrays": (
        behind(replace(ENCODERS, input=TensorSpec("features", "float32", ("batch", 8)))),
        "bucket 1x1..40; expected one row of 40 places",
    ),
    "suppressed beyond": (replace(ENTRY, suppressed_ids=(1, 48)), "suppressed_ids [1, 48]; expected numbers below"),
    "first suppressed beyond": (replace(ENTRY, suppressed_first_ids=(49,)), "suppressed_ids [49]; expected numbers"),
    "no tokenizer": (replace(ENTRY, tokenizer="other.json"), "file 'other.json' is not among the files"),
    "vocabulary": (replace(ENTRY, vocabulary=2**26), "logits of 64 rows have more than"),
    "empty state": (replace(ENTRY, states=((4, 0),)), "a state has more than 8 dimensions, or one that is empty"),
    "huge states": (replace(ENTRY, states=((2**15, 2**16),)), "the states of a row have 2147483648 numbers"),
    "several tokens into states": (replace(ENTRY, states=((4,),)), "40 new tokens; with states, expected one"),
}


@pytest.mark.parametrize("case", REFUSED_GENERATION)
def test_what_is_refused(manifest: Manifest, case: str) -> None:
    entry, message = REFUSED_GENERATION[case]
    assert any(message in problem for problem in problems(manifest, entry)), problems(manifest, entry)


def test_a_tensor_shrinks_with_its_axis() -> None:
    spec = ElasticSpec((Axis("layers.0.heads", 4),), ())
    small = spec.submodel({"layers.0.heads": 3})
    assert TaskTensor("a", (32, 2), "layers.0.heads", 8).shape_in(small) == (24, 2)
    assert TaskTensor("b", (5,)).shape_in(small) == (5,)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda tasks: tasks.update(base_sha256="x"), "base_sha256 'x'; expected 64"),
        (lambda tasks: tasks.update(tensors=[]), "expected at least one tensor"),
        (lambda tasks: tasks["tensors"][0].update(shape=[]), "expected 1 to 8 positive numbers"),
        (lambda tasks: tasks["tensors"][0].update(shape=[2**20, 2**20]), "more than 2147483648 elements"),
        (lambda tasks: tasks["tensors"][0].update(name="input_ids"), "'input_ids' stands twice, or is an input"),
        (
            lambda tasks: tasks["tensors"][0].update(axis="layers.0.ffn"),
            "does not begin with 1 for each step of an axis",
        ),
        (lambda tasks: tasks["tensors"][0].update(axis="coda.reduction"), "does not begin with 1 for each step"),
        (lambda tasks: tasks.update(kind="dora"), "kind: got 'dora'"),
    ],
)
def test_a_manifest_of_other_tensors_is_refused(edit: Edit, said: str) -> None:
    data = json.loads((TASKS / "manifest.json").read_text())
    edit(data["tasks"])
    with pytest.raises(BundleFormatError, match=said):
        read_manifest(json.dumps(data).encode(), "manifest.json")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda task: task.update(name="../x"), "expected a name of at most 64"),
        (lambda task: task.update(name="QUARTER"), "quarter stands twice"),
        (lambda task: task.update(file="../weights.safetensors"), "expected a plain name such as task.NAME"),
        (lambda task: task.update(file="weights.safetensors"), "expected a plain name such as task.NAME"),
        (lambda task: task.update(sha256="0"), "expected 64 lower-case"),
        (lambda task: task.update(submodels=["ffn7"]), "submodels 'ffn7' are not all in the manifest"),
        (lambda task: task.update(submodels=[]), "submodels '' are not all in the manifest"),
        (lambda task: task["parity"].pop(), "expected one for every engine of its submodels"),
    ],
)
def test_a_list_of_other_tasks_is_refused(edit: Edit, said: str, tmp_path: Path) -> None:
    for path in TASKS.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data = json.loads((TASKS / TASKS_NAME).read_text())
    edit(data["tasks"][0])
    del data["seal"]
    (tmp_path / TASKS_NAME).write_bytes(sealed_json(data))
    with pytest.raises(BundleFormatError, match=said):
        read_tasks(open_bundle(tmp_path))


def test_engines_that_tasks_are_merged_into_stand_beside_all_others() -> None:
    """And are judged as the engines of a bundle of their own."""
    data = json.loads((GOLDEN / "bundle-merged" / "manifest.json").read_text())
    for edit, said in (
        (lambda merged: merged.pop(), "tasks: merged; expected one for every engine that takes tasks"),
        (lambda merged: merged[0].update(kind={"name": "decode"}), "tasks: merged; expected one for every engine"),
        (lambda merged: merged[0].pop("parity"), r"ffn16-heads1\.merged@b1-s16: has no parity receipt"),
        (lambda merged: merged[0].update(file="x.onnx"), "file 'x.onnx' is not among the files"),
        (lambda merged: merged[0].update(id=data["engines"][0]["id"]), "engine 'ffn16-heads1@b1-s16' stands twice"),
    ):
        changed = json.loads(json.dumps(data))
        edit(changed["tasks"]["merged"])
        with pytest.raises(BundleFormatError, match=said):
            read_manifest(json.dumps(changed).encode(), "manifest.json")
