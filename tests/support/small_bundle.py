"""A small real bundle: a masked two-layer network, two submodels as prefix views of one store, two buckets."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry, ParityReceipt
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.bundle.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    BudgetEntry,
    Limits,
    Manifest,
    Provenance,
    Ranking,
    SubmodelEntry,
    TextEntry,
)
from nestforge.elastic import Axis
from nestforge.strict import unstructure
from numpy.typing import NDArray
from support.exit_bundles import listed, with_views, write_exits_bundle, write_exits_manifest, write_store
from support.latencies import latency

VOCABULARY, HIDDEN, FFN = 16, 16, 32
PARAMETERS = (VOCABULARY + 1) * HIDDEN  # that do not shrink
BUCKETS = (Bucket(1, 8), Bucket(2, 16))
RANGE = Bucket(4, 16, 1, 2)
# Shapes of that range, up and down, some of them twice.
RANGE_SHAPES = [Bucket(1, 2), Bucket(4, 16), Bucket(4, 16), Bucket(1, 16), Bucket(3, 7), Bucket(4, 2), Bucket(1, 2)]
WIDTHS = {"ffn16": 16, "ffn32": 32}
PARITY = ParityReceipt("numpy", "exact", 0.0, 0.0, 1.0, ("seed 0",), (), "0" * 64, "0" * 64, 0.0)


def shapes(width: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, HIDDEN), "up.weight": (width, HIDDEN)}
    return found | {"up.bias": (width,), "down.weight": (width, HIDDEN), "down.bias": (HIDDEN,)}


def make_weights() -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(7)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes(FFN).items()}


def make_graph(width: int, bucket: Bucket, offsets: Mapping[str, int]) -> bytes:
    """``hidden = mask * (relu(x up^T + b) down + c)`` and its sum over the sequence."""
    batch, steps = TensorSpec("", "int64", ("batch", "sequence")).declared(bucket)
    full = f", int64[3] full = {{{bucket.batch}, {bucket.sequence}, {HIDDEN}}}" if bucket.is_static else ""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        tiny (int64[{batch},{steps}] input_ids, int64[{batch},{steps}] attention_mask)
            => (float[{batch},{steps},{HIDDEN}] hidden, float[{batch},{HIDDEN}] total)
        <int64[2] flat = {{-1, {HIDDEN}}}, int64[1] last = {{2}}, int64[1] along = {{1}}{full}> {{
            x = Gather (embedding, input_ids)
            {"" if full else "full = Shape (x)"}
            x2 = Reshape (x, flat)
            u = Gemm <transB = 1> (x2, up_weight, up_bias)
            r = Relu (u)
            d = Gemm (r, down_weight, down_bias)
            d3 = Reshape (d, full)
            m = Cast <to = 1> (attention_mask)
            m3 = Unsqueeze (m, last)
            hidden = Mul (d3, m3)
            total = ReduceSum <keepdims = 0> (hidden, along)
        }}""")
    return with_views(model, shapes(width), offsets)


def reference(width: int, ids: NDArray[Any], mask: NDArray[Any]) -> dict[str, NDArray[np.float32]]:
    w = make_weights()
    x = w["embedding"][ids]
    hidden = np.maximum(x @ w["up.weight"][:width].T + w["up.bias"][:width], 0) @ w["down.weight"][:width]
    hidden = (hidden + w["down.bias"]) * mask[..., None].astype(np.float32)
    return {"hidden": hidden, "total": hidden.sum(axis=1)}


def make_tokenizer() -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {word: i for i, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "nest", "of", "models"])}
    tokenizer: Any = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106 - a token of the vocabulary, no password
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    # Published tokenizers carry such settings; the runtime must not let them act unseen.
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=7)
    return str(tokenizer.to_str())


def make_manifest(buckets: Sequence[Bucket] = BUCKETS) -> Manifest:
    """The tiny bundle's manifest, its files not filled in yet."""
    tokens = ("batch", "sequence")
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name="tiny",
        family="test",
        axes=(Axis("layers.0.ffn", FFN),),
        trained_nested=True,
        ranking=Ranking("none"),
        submodels=tuple(
            SubmodelEntry(
                name,
                ("XL",) if width == FFN else ("S",),
                {"ffn": (width,)},
                PARAMETERS + (2 * HIDDEN + 1) * width,
                4 * (PARAMETERS + (2 * HIDDEN + 1) * width),
            )
            for name, width in WIDTHS.items()
        ),
        engines=tuple(
            EngineEntry(
                id=f"{name}@{bucket.label}",
                submodel=name,
                bucket=bucket,
                backend="onnxruntime",
                file=f"{name}.{bucket.label}.onnx",
                emitted="sliced",
                private_bytes=64,
                flops=1000,
                moved_bytes=1000,
                activation_bytes=16 * bucket.tokens * width,
                parity=PARITY,
            )
            for name, width in WIDTHS.items()
            for bucket in buckets
        ),
        budgets=(BudgetEntry("edge", Limits(latency_ms=1.0), "ffn16", "the largest within 1 ms"),),
        inputs=(
            TensorSpec("input_ids", "int64", tokens, pad=0, high=VOCABULARY),
            TensorSpec("attention_mask", "int64", tokens, pad=0, high=2),
        ),
        outputs=(TensorSpec("hidden", "float32", (*tokens, HIDDEN)), TensorSpec("total", "float32", ("batch", HIDDEN))),
        files=(),
        provenance=Provenance({}, (), {}),
        text=TextEntry("tokenizer.json", "input_ids", "attention_mask", None, "total"),
    )


LATENCIES = (
    latency("ffn16@b1-s8", 0.5, 0.4, 0.6, "packed"),
    latency("ffn32@b1-s8", 1.5, 2.5, 2.9, "packed"),
    latency("ffn16@b2-s16", 3.0),
    latency("ffn32@b2-s16", 6.0),
    latency(f"ffn16@{RANGE.label}", 4.0),
    latency(f"ffn32@{RANGE.label}", 8.0),
)


def write_manifest(folder: Path, manifest: object) -> None:
    """Writes ``manifest`` (a Manifest or plain data) and a build record that names its hash."""
    data = unstructure(manifest)
    engines = {engine["id"] for engine in data["engines"]}
    write_exits_manifest(folder, data, [latency for latency in LATENCIES if latency.engine in engines])


def write_tiny_bundle(folder: Path, manifest: Manifest) -> Path:
    offsets = write_store(folder, make_weights())
    for engine in manifest.engines:
        (folder / engine.file).write_bytes(make_graph(WIDTHS[engine.submodel], engine.bucket, offsets))
    (folder / "tokenizer.json").write_text(make_tokenizer())
    write_manifest(folder, replace(manifest, files=listed(folder)))
    return folder


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by tests that only read it."""
    return write_tiny_bundle(tmp_path_factory.mktemp("bundles") / "tiny.bundle", make_manifest())


@pytest.fixture(scope="session")
def range_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network with one range, ``1..4x2..16``; shared by tests that only read it."""
    return write_tiny_bundle(tmp_path_factory.mktemp("bundles") / "range.bundle", make_manifest([RANGE]))


@pytest.fixture(scope="session")
def exits_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with exits, see exit_bundles.py; shared by tests that only read it."""
    return write_exits_bundle(tmp_path_factory.mktemp("bundles") / "exits.bundle")


@pytest.fixture
def own_bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "own.bundle"))


@pytest.fixture
def manifest() -> Manifest:
    return make_manifest()


@pytest.fixture
def expected() -> Callable[[int, NDArray[Any], NDArray[Any]], dict[str, NDArray[np.float32]]]:
    """``expected(width, ids, mask)``: the tiny model's outputs, by numpy."""
    return reference


@pytest.fixture
def edit_manifest() -> Callable[[Path, Callable[[dict[str, Any]], object]], None]:
    """``edit_manifest(folder, edit)``: changes the manifest's JSON and has the build record vouch for it."""

    def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
        data = json.loads((folder / MANIFEST_NAME).read_bytes())
        edit(data)
        write_manifest(folder, data)

    return change


@pytest.fixture
def feeds() -> Callable[..., dict[str, NDArray[np.int64]]]:
    """``feeds(batch, sequence)``: random ids, everything attended to."""

    def make(batch: int, sequence: int, seed: int = 0) -> dict[str, NDArray[np.int64]]:
        ids = np.random.default_rng(seed).integers(0, VOCABULARY, (batch, sequence))
        return {"input_ids": ids, "attention_mask": np.ones((batch, sequence), np.int64)}

    return make
