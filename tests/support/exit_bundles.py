"""A small real bundle with exits, on whole numbers that float32 holds exactly: every answer is known to the bit; rows
to calibrate it on, as arrays and texts, its tokenizer, and a policy of it."""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.build_record import BuildRecord, Latency
from nestforge.bundle.entries.engine_entry import (
    EngineEntry,
    ExitsEntry,
    GateEntry,
    ParityReceipt,
    Segment,
    SegmentEntry,
    Whole,
)
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.bundle.files import WEIGHTS_NAME, sealed_json
from nestforge.bundle.manifest import (
    BUILD_NAME,
    MANIFEST_NAME,
    SCHEMA_VERSION,
    BudgetEntry,
    FileEntry,
    Limits,
    Manifest,
    Provenance,
    Ranking,
    SubmodelEntry,
    TextEntry,
)
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.elastic import Axis
from nestforge.profiles.probe_host import probe_host
from nestforge.runtime.calibrate import measure as measure_exits
from nestforge.runtime.engines.onnxruntime_gpu.provider import Provider
from nestforge.runtime.engines.runner import EnginePool
from nestforge.runtime.exits.chain import ExitChain
from nestforge.runtime.exits.policy import CalibratedPolicy, Costs, CurvePoint, Figures
from nestforge.strict import unstructure
from numpy.typing import NDArray
from onnx import TensorProto
from safetensors.numpy import save_file

VOCABULARY, HIDDEN, CLASSES = 16, 4, 3
LAYERS = (1, 2, 4)  # of the exits
LEVELS = (-1.0, 0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # of the engines' entropies; and closed
DEPTHS = (2, 4)  # of the submodels
BUCKETS = tuple(Bucket(batch, sequence) for batch in (1, 4, 8) for sequence in (8, 16))
GATE = GateEntry("<=", (0.25, 0.375))
PARITY = ParityReceipt("numpy", "exact", 0.0, 0.0, 1.0, ("seed 0",), (), "0" * 64, "0" * 64, 0.0)

_TOKENS = ("batch", "sequence")
_STATE = (*_TOKENS, HIDDEN)
_MASK = TensorSpec("attention_mask", "int64", _TOKENS, pad=0, high=2)
INPUTS = (TensorSpec("input_ids", "int64", _TOKENS, pad=0, high=VOCABULARY), _MASK)
OUTPUTS = (TensorSpec("logits", "float32", ("batch", CLASSES)), TensorSpec("entropy", "float32", ("batch",)))


def weights() -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(3)
    shapes = {"table": (VOCABULARY, HIDDEN)} | {f"shift.{layer}": (HIDDEN,) for layer in range(LAYERS[-1])}
    return {name: rng.integers(0, 16, shape).astype(np.float32) for name, shape in shapes.items()}


def every_exit(ids: NDArray[Any], mask: NDArray[Any]) -> list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """State ``[B, S, H]``, logits and entropy at every exit, by numpy.

    A layer adds to each position what it has itself, the masked sum over all positions and a shift, modulo 16.
    """
    store = weights()
    state = store["table"][ids] * mask[..., None]
    found = []
    for layer in range(LAYERS[-1]):
        total = (state * mask[..., None]).sum(axis=1, keepdims=True)
        state = np.mod(state + total + store[f"shift.{layer}"], 16).astype(np.float32)
        if layer + 1 in LAYERS:
            found.append((state, state[:, 0, :CLASSES], np.mod(state[:, 0, CLASSES], 8) / 8))
    return found


def requests(lengths: Sequence[int], sequence: int | None = None, seed: int = 0) -> dict[str, NDArray[np.int64]]:
    """Random ids, one row per length, padded to ``sequence``."""
    rng = np.random.default_rng(seed)
    sequence = sequence or max(lengths)
    mask = (np.arange(sequence) < np.array(lengths)[:, None]).astype(np.int64)
    return {"input_ids": rng.integers(0, VOCABULARY, mask.shape) * mask, "attention_mask": mask}


@contextmanager
def open_chain(bundle: Bundle, provider: Provider | None = None) -> Iterator[ExitChain]:
    """The chain of the deeper submodel on engines of its own."""
    pool = EnginePool(bundle, {engine.id: "shared" for engine in bundle.manifest.engines}, 1, provider)
    chain = ExitChain(bundle, "depth4", pool, ())
    try:
        yield chain
    finally:
        pool.close()
        chain.release()


def check_exits(run: Any, feeds: Any, thresholds: Sequence[float], exits: int = len(LAYERS)) -> None:
    """Every row of a ``ChainRun`` has the answer of the exit that it must leave at, by numpy."""
    found = every_exit(feeds["input_ids"], feeds["attention_mask"])[:exits]
    for row in range(len(run.logits)):
        entropies = [entropy[row] for _, _, entropy in found]
        index = next((j for j, limit in enumerate(thresholds) if entropies[j] <= limit), exits - 1)
        assert (run.index[row], run.layer[row], run.entropy[row]) == (index, LAYERS[index], entropies[index])
        assert run.logits[row].tolist() == found[index][1][row].tolist()


def shapes_of(chain: Any, feeds: Any, policy: Any) -> list[str]:
    """``4x16+1x16`` per segment that ran."""
    seen: list[str] = []
    chain.run(feeds, policy, lambda run: seen.append("+".join(map(str, run.buckets))))
    return seen


def exits_entry(trims: bool = True) -> ExitsEntry:
    state = TensorSpec("next_state", "float32", _STATE)
    taken: tuple[TensorSpec, ...] = INPUTS
    segments = []
    for layer in LAYERS:
        passed = (state,) if layer != LAYERS[-1] else ()
        segments.append(SegmentEntry(f"to{layer}", layer, taken, (*passed, *OUTPUTS)))
        taken = (TensorSpec("state", "float32", _STATE), _MASK)
    return ExitsEntry(
        tuple(segments), CLASSES, "logits", "entropy", "state", "next_state", "attention_mask", trims, GATE
    )


def exits_manifest(buckets: Sequence[Bucket] = BUCKETS, trims: bool = True) -> Manifest:
    """The bundle's manifest, its files not filled in yet, of the schema that ``buckets`` need. Submodel ``depth2``
    shares its segments with ``depth4``."""
    exits = exits_entry(trims)
    engines = []
    for depth in DEPTHS:
        for bucket in buckets:
            engines.append(_engine(f"depth{depth}", None, depth, bucket))
            engines += [
                _engine(f"depth{depth}", segment, segment.layer - before, bucket)
                for before, segment in zip((0, *LAYERS), exits.segments, strict=False)
                if segment.layer <= depth
            ]
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name="leaver",
        family="test",
        axes=(Axis("depth", LAYERS[-1], LAYERS),),
        trained_nested=False,
        ranking=Ranking("none"),
        submodels=tuple(
            SubmodelEntry(f"depth{depth}", ("XL",) if depth == LAYERS[-1] else ("S",), {"depth": (depth,)}, n, 4 * n)
            for depth in DEPTHS
            for n in [VOCABULARY * HIDDEN + HIDDEN * depth]
        ),
        engines=tuple(engines),
        budgets=(
            BudgetEntry("quick", Limits(latency_ms=1.0), "depth4", "the largest within 1 ms"),
            BudgetEntry("small", Limits(parameters=72), "depth2", "the largest within 72 parameters"),
        ),
        inputs=INPUTS,
        outputs=OUTPUTS,
        files=(),
        provenance=Provenance({}, (), {}),
        exits=exits,
    )


def _engine(submodel: str, segment: SegmentEntry | None, layers: int, bucket: Bucket) -> EngineEntry:
    part = f"{submodel}.{segment.name}" if segment else submodel
    return EngineEntry(
        id=f"{part}@{bucket.label}",
        submodel=submodel,
        bucket=bucket,
        backend="onnxruntime",
        file=f"{segment.name if segment else submodel}.{bucket.label}.onnx",
        emitted="sliced",
        private_bytes=16,
        flops=100 * layers * bucket.tokens,
        moved_bytes=1000,
        activation_bytes=16 * bucket.tokens,
        parity=PARITY,
        kind=Segment(part=segment.name) if segment else Whole(),
        weight_bytes=4 * HIDDEN * (layers + VOCABULARY * (segment.layer == LAYERS[0])) if segment else None,
    )


def write_exits_bundle(
    folder: Path,
    buckets: Sequence[Bucket] = BUCKETS,
    latencies: Sequence[Latency] = (),
    trims: bool = True,
) -> Path:
    """The bundle; without ``latencies`` engines cost as much as they have tokens."""
    offsets = write_store(folder, weights())
    manifest = exits_manifest(buckets, trims)
    spans = dict(zip((f"to{layer}" for layer in LAYERS), zip((0, *LAYERS), LAYERS, strict=False), strict=True))
    for engine in manifest.engines:
        first, last = spans[engine.segment] if engine.segment else (0, int(engine.submodel.removeprefix("depth")))
        (folder / engine.file).write_bytes(_graph(manifest, engine, first, last, offsets))
    write_exits_manifest(folder, replace(manifest, files=listed(folder)), latencies)
    return folder


def write_store(folder: Path, tensors: Mapping[str, NDArray[np.float32]]) -> dict[str, int]:
    """The new ``folder`` with a weight store; returns where each tensor begins in it."""
    folder.mkdir()
    save_file(dict(tensors), folder / WEIGHTS_NAME)
    raw = (folder / WEIGHTS_NAME).read_bytes()
    (header_length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + header_length])
    return {name: 8 + header_length + entry["data_offsets"][0] for name, entry in header.items()}


def listed(folder: Path) -> tuple[FileEntry, ...]:
    """Every file in ``folder``, as a manifest lists it."""
    return tuple(
        FileEntry(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.iterdir())
    )


def write_exits_manifest(folder: Path, manifest: object, latencies: Sequence[Latency] = ()) -> None:
    """Writes ``manifest`` (a Manifest or plain data) and a build record that names its hash."""
    raw = json.dumps(unstructure(manifest)).encode()
    (folder / MANIFEST_NAME).write_bytes(raw)
    host = asdict(probe_host())
    digest = hashlib.sha256(raw).hexdigest()
    version = json.loads(raw)["schema_version"]
    record = BuildRecord(version, digest, "2026-11-21T00:00:00Z", (), host, {}, {}, tuple(latencies))
    (folder / BUILD_NAME).write_bytes(sealed_json(unstructure(record)))


def _graph(manifest: Manifest, engine: EngineEntry, first: int, last: int, offsets: Mapping[str, int]) -> bytes:
    inputs, outputs = (
        ", ".join(
            f"{s.dtype.replace('32', '')}[{','.join(map(str, s.declared(engine.bucket)))}] {s.name}" for s in specs
        )
        for specs in manifest.interface_of(engine)
    )
    read = {f"shift.{layer}": (HIDDEN,) for layer in range(first, last)}
    current, layers = "state", []
    if first == 0:
        read["table"] = (VOCABULARY, HIDDEN)
        current, layers = "begin", ["words = Gather (table, input_ids) begin = Mul (words, m3)"]
    for layer in range(first, last):
        result = "next_state" if layer == last - 1 else f"state_{layer}"
        layers.append(f"""
            masked_{layer} = Mul ({current}, m3)
            total_{layer} = ReduceSum <keepdims = 1> (masked_{layer}, steps)
            sum_{layer} = Add ({current}, total_{layer})
            shifted_{layer} = Add (sum_{layer}, shift_{layer})
            {result} = Mod <fmod = 1> (shifted_{layer}, sixteen)""")
        current = result
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]> leaver ({inputs}) => ({outputs})
        <int64[1] last = {{2}}, int64[1] steps = {{1}}, int64[2] parts = {{{CLASSES}, 1}}, int64 zero = {{0}},
         float sixteen = {{16}}, float eight = {{8}}> {{
            m = Cast <to = 1> (attention_mask)
            m3 = Unsqueeze (m, last)
            {" ".join(layers)}
            first = Gather <axis = 1> ({current}, zero)
            logits, last_column = Split <axis = 1> (first, parts)
            column = Squeeze (last_column, steps)
            rest = Mod <fmod = 1> (column, eight)
            entropy = Div (rest, eight)
        }}""")
    return with_views(model, read, offsets)


def with_views(model: onnx.ModelProto, read: Mapping[str, tuple[int, ...]], offsets: Mapping[str, int]) -> bytes:
    """The graph with initializers that lie in the weight store; in its text ``_`` stands for a dot of their names."""
    for name, shape in read.items():
        model.graph.initializer.append(view(name, shape, offsets))
        for node in model.graph.node:
            node.input[:] = [name if one == name.replace(".", "_") else one for one in node.input]
    return bytes(model.SerializeToString())


def view(name: str, shape: tuple[int, ...], offsets: Mapping[str, int]) -> TensorProto:
    """An initializer that lies in the weight store."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    length = 4 * int(np.prod(shape))
    for key, value in (("location", WEIGHTS_NAME), ("offset", offsets[name]), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


LONGEST = 16
WORDS = ["[PAD]", *(f"w{number}" for number in range(1, VOCABULARY))]


@contextmanager
def timed_once() -> Iterator[None]:
    """For tests that do not look at how long things take: calibration times each of them once."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_TIMED_RUNS", "_MIN_ROUNDS", "_MAX_ROUNDS"):
            patch.setattr(measure_exits, name, 1)
        yield


def make_rows(count: int, seed: int = 0) -> dict[str, Any]:
    """Inputs of ``count`` rows of 1 to 16 tokens, and as label what the last exit answers, for nine rows in ten."""
    rng = np.random.default_rng(seed)
    feeds = requests(rng.integers(1, LONGEST + 1, count), LONGEST, seed)
    labels = every_exit(feeds["input_ids"], feeds["attention_mask"])[-1][1].argmax(axis=1)
    labels = np.where(rng.random(count) < 0.9, labels, (labels + 1) % 3)
    return {**feeds, "labels": labels}


def write_arrays(path: Path, count: int = 150, labelled: bool = True, seed: int = 0) -> Path:
    rows = make_rows(count, seed)
    np.savez(path, **{name: array for name, array in rows.items() if labelled or name != "labels"})
    return path


def write_texts(path: Path, count: int = 150) -> Path:
    """The rows of ``make_rows`` whose tokens are all words, a line each."""
    rows = make_rows(count)
    lines = []
    for ids, mask, label in zip(rows["input_ids"], rows["attention_mask"], rows["labels"], strict=True):
        text = " ".join(f"w{token}" for token in ids[: mask.sum()] if token)
        lines.append(json.dumps({"text": text or "w1", "label": int(label)}))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_text_bundle(folder: Path) -> Path:
    """The small bundle with exits, and a tokenizer that knows ``WORDS``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    write_exits_bundle(folder)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer: Any = Tokenizer(models.WordLevel(vocabulary, unk_token=WORDS[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    raw = str(tokenizer.to_str()).encode()
    (folder / "tokenizer.json").write_bytes(raw)
    manifest = open_bundle(folder).manifest
    files = (*manifest.files, FileEntry("tokenizer.json", len(raw), hashlib.sha256(raw).hexdigest()))
    text = TextEntry("tokenizer.json", "input_ids", "attention_mask", None, None)
    write_exits_manifest(folder, replace(manifest, files=files, text=text))
    return folder


COSTS = Costs(1e6, 2.0, 1.9, 3.0, 3.5)
FIGURES = Figures(10, COSTS, 0.9, (5, 2, 3))
POINT = CurvePoint(0.25, FIGURES)


def policy(name: str = "lean", submodel: str = "depth4") -> CalibratedPolicy:
    exits = {"depth4": 3, "depth2": 2}[submodel]
    return CalibratedPolicy(
        name=name,
        submodel=submodel,
        budget="mean_latency_ms<=2",
        batch=1,
        thresholds=(0.25, 0.5)[: exits - 1],
        compare="<=",
        rule="per_row",
        histogram=(5, 2, 3)[:exits],
        quality_is="accuracy",
        data_sha256="0" * 64,
        rows=10,
        truncated_rows=0,
        correction=1.01,
        simulated=FIGURES,
        measured=FIGURES,
        whole=FIGURES,
        curve=(POINT,),
        global_point=POINT,
        engines=("depth4@b1-s8",),
        processor="a processor",
        threads=2,
        created="2026-11-21T00:00:00+00:00",
    )
