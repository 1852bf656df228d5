import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import Decode, EngineEntry, EngineKind, Segment, Whole
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleCorruptError, BundleError, BundleIncompatibleError, InputError
from nestforge.profiles.precision import Precision
from nestforge.runtime.engines.onnxruntime import runner as runner_module
from nestforge.runtime.engines.onnxruntime.runner import OnnxRuntimeRunner
from nestforge.runtime.engines.onnxruntime.session import OPTIMIZATION_LEVEL, SPIN_DURATION, open_session
from nestforge.runtime.engines.residency import RESIDENCIES, Residency
from nestforge.runtime.engines.runner import runnable_engines, runner_for
from nestforge.runtime.inputs.arrays import random_feeds
from support.exit_bundles import write_exits_bundle
from support.sealing import reseal

Reference = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nestforge" / "mapped"


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_every_engine_equals_numpy_in_every_residency(
    bundle: Bundle, expected: Reference, residency: Residency
) -> None:
    for engine in bundle.manifest.engines:
        feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
        with runner_for(bundle, engine, residency, 1) as runner:
            hidden, total = runner.run(feeds)
        want = expected(int(engine.submodel[3:]), feeds["input_ids"], feeds["attention_mask"])
        np.testing.assert_allclose(hidden, want["hidden"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(total, want["total"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("precision", "order"), [("fp32", "DEFAULT"), ("fp16", "PRIORITY_BASED")])
def test_stored_half_precision_is_widened_in_the_order_of_the_graph(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, precision: Precision, order: str
) -> None:
    """By default ONNX Runtime widens all of them before anything else, and holds them at once."""
    opened: list[Any] = []
    monkeypatch.setattr(runner_module, "open_session", lambda *a: opened.append(a[1]) or open_session(*a))
    with runner_for(bundle, replace(bundle.manifest.engines[0], precision=precision), "shared", 1):
        assert [options.execution_order.name for options in opened] == [order]


@pytest.fixture
def ranged(tmp_path: Path) -> tuple[Bundle, EngineEntry]:
    """A segment that takes 1 to 4 rows of 2 to 8 steps."""
    bundle = open_bundle(write_exits_bundle(tmp_path / "range", [Bucket(4, 8, 1, 2)]))
    return bundle, next(engine for engine in bundle.manifest.engines if engine.segment == "to2")


def segment_arrays(bundle: Bundle, shape: Bucket) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs of that segment and room for its outputs."""
    engine = next(engine for engine in bundle.manifest.engines if engine.segment == "to2")
    inputs, outputs = bundle.manifest.interface_of(engine)
    room = {spec.name: np.empty(spec.shape(shape), spec.dtype) for spec in outputs}
    return random_feeds(inputs, shape, shape.tokens), room


def test_arrays_of_several_shapes_or_beyond_a_range_are_not_bound(ranged: tuple[Bundle, EngineEntry]) -> None:
    bundle, engine = ranged
    feeds, room = segment_arrays(bundle, Bucket(3, 5))
    cases = (
        (
            {**feeds, "attention_mask": feeds["attention_mask"][:2]},
            room,
            "attention_mask: expected contiguous int64 [3, 5]",
        ),
        (feeds, {"entropy": np.empty(2, np.float32)}, "entropy: expected contiguous float32 [3], got float32 [2]"),
        (*segment_arrays(bundle, Bucket(3, 9)), "state: expected contiguous float32 [3, 8, 4], got float32 [3, 9, 4]"),
        (*segment_arrays(bundle, Bucket(5, 1)), "state: expected contiguous float32 [4, 2, 4], got float32 [5, 1, 4]"),
    )
    with runner_for(bundle, engine, "shared", 1) as runner:
        for given, into, message in cases:
            with pytest.raises(InputError, match=f"^{re.escape(f'engine {engine.id}: {message}')}"):
                runner.bind(given, into)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_a_segment_has_an_interface_of_its_own(exits_bundle: Path, residency: Residency) -> None:
    bundle = open_bundle(exits_bundle)
    engine = next(engine for engine in bundle.manifest.engines if engine.segment == "to2")
    feeds = random_feeds(bundle.manifest.interface_of(engine)[0], engine.bucket)
    with runner_for(bundle, engine, residency, 1) as runner:
        state, logits, _ = runner.run(feeds)
    assert np.array_equal(state[:, 0, :3], logits)
    with pytest.raises(BundleCorruptError, match=r"engine depth2.to2@b1-s8: inputs are .* the manifest says"):
        runner_for(bundle, replace(engine, kind=Segment(part="to1")), "shared", 1).__enter__()


def test_what_onnxruntime_refuses_is_one_line(bundle: Bundle) -> None:
    engine = bundle.manifest.engines[0]
    feeds = {"input_ids": np.full((1, 8), 99), "attention_mask": np.ones((1, 8), np.int64)}
    with runner_for(bundle, engine, "shared", 1) as runner:
        for call in (lambda: runner.run(feeds), runner.bind(feeds, {"total": np.empty((1, 16), np.float32)})):
            with pytest.raises(InputError, match=r"^engine ffn16@b1-s8: ") as error:
                call()
            assert "indices element out of data bounds, idx=99" in str(error.value)
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", ["half", "empty", "noise"])
def test_a_damaged_engine_is_named(own_bundle: Path, damage: str) -> None:
    path = own_bundle / "ffn16.b1-s8.onnx"
    raw = path.read_bytes()
    path.write_bytes({"half": raw[: len(raw) // 2], "empty": b"", "noise": b"\xff" * 100}[damage])
    with pytest.raises(BundleError, match=r"ffn16.b1-s8.onnx: \d+ bytes, expected \d+; fetch the bundle again"):
        open_bundle(own_bundle)
    reseal(own_bundle)
    bundle = open_bundle(own_bundle)
    engine = bundle.manifest.engines[0]
    said = r"ffn16.b1-s8.onnx: (onnxruntime 1\.\S+ cannot open it: |no ONNX file: )"
    with pytest.raises(BundleError, match=said) as error:
        runner_for(bundle, engine, "shared", 1).__enter__()
    assert "\n" not in str(error.value)


@pytest.fixture
def forge(own_bundle: Path, edit_manifest: Any) -> Callable[[Callable[[onnx.ModelProto], bytes]], Bundle]:
    """``forge(change)``: the bundle with what ``change`` makes of its first engine's graph, listed as it is then."""

    def made(change: Callable[[onnx.ModelProto], bytes]) -> Bundle:
        graph = own_bundle / "ffn16.b1-s8.onnx"
        raw = change(onnx.load(graph, load_external_data=False))
        graph.write_bytes(raw)
        facts = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        edit_manifest(
            own_bundle, lambda data: [one.update(facts) for one in data["files"] if one["path"] == graph.name]
        )
        return open_bundle(own_bundle)

    return made


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize(
    ("name", "shown"),
    [(b"\xff\xfeten", "\ufffd\ufffdten"), (b"\x1b[2Jten", r"\x1b[2Jten")],
    ids=["no UTF-8", "escapes"],
)
def test_names_in_a_damaged_graph_are_shown_printable(
    forge: Any, name: bytes, shown: str, residency: Residency
) -> None:
    """ONNX Runtime quotes them; where they are no UTF-8, Python cannot even make its exception."""

    def renamed(model: onnx.ModelProto) -> bytes:
        cast = next(node for node in model.graph.node if node.op_type == "Cast")
        cast.input[0] = "N" * len(name)
        return bytes(model.SerializeToString().replace(b"N" * len(name), name))

    bundle = forge(renamed)
    with pytest.raises(BundleError, match="cannot open it: ") as caught:
        runner_for(bundle, bundle.manifest.engines[0], residency, 1).__enter__()
    assert shown in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_an_engine_that_opens_and_does_not_run_is_refused(forge: Any, residency: Residency) -> None:
    """A mapped engine runs when it is packed, before anybody asks."""

    def unshaped(model: onnx.ModelProto) -> bytes:
        indices = onnx.numpy_helper.from_array(np.array([[99]], np.int64), "far")
        model.graph.initializer.append(indices)
        gather = next(node for node in model.graph.node if node.op_type == "Gather")
        model.graph.node.insert(0, onnx.helper.make_node("Gather", [gather.input[0], "far"], ["nothing"]))
        model.graph.node.append(onnx.helper.make_node("ReduceSum", ["nothing"], ["nowhere"]))
        total = next(node for node in model.graph.node if node.output[0] == "total")
        total.output[0] = "total_before"
        model.graph.node.append(onnx.helper.make_node("Add", ["total_before", "nowhere"], ["total"]))
        model.graph.node[-2].attribute.append(onnx.helper.make_attribute("keepdims", 0))
        return bytes(model.SerializeToString())

    bundle = forge(unshaped)
    engine = bundle.manifest.engines[0]
    expected = BundleCorruptError if residency == "mapped" else InputError
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    with (
        pytest.raises(expected, match="indices element out of data bounds, idx=99"),
        runner_for(bundle, engine, residency, 1) as runner,
    ):
        runner.run(feeds)


def test_a_short_weight_store_is_refused_at_open(own_bundle: Path) -> None:
    os.truncate(own_bundle / WEIGHTS_NAME, 100)
    reseal(own_bundle)
    bundle = open_bundle(own_bundle)
    with pytest.raises(BundleError, match=r"weights\.safetensors: cannot be read as a weight store"):
        runner_for(bundle, bundle.manifest.engines[0], "shared", 1).__enter__()


def test_weights_outside_the_bundle_are_refused(own_bundle: Path, tmp_path: Path) -> None:
    bundle = open_bundle(own_bundle)
    (own_bundle / WEIGHTS_NAME).rename(tmp_path / WEIGHTS_NAME)
    (own_bundle / WEIGHTS_NAME).symlink_to(tmp_path / WEIGHTS_NAME)
    with pytest.raises(BundleError, match=r"weights\.safetensors: removed, replaced or written to since the"):
        runner_for(bundle, bundle.manifest.engines[0], "shared", 1).__enter__()


def test_a_backend_that_is_not_available(bundle: Bundle) -> None:
    foreign = tuple(replace(engine, backend="tensorrt") for engine in bundle.manifest.engines)
    mixed = replace(bundle, manifest=replace(bundle.manifest, engines=(*foreign, bundle.manifest.engines[0])))
    assert runnable_engines(mixed) == (bundle.manifest.engines[0],)
    with pytest.raises(BundleIncompatibleError, match="cannot run its engines: tensorrt is not installed"):
        runnable_engines(replace(bundle, manifest=replace(bundle.manifest, engines=foreign)))
    with pytest.raises(BundleIncompatibleError, match="engine ffn16@b1-s8: needs TensorRT: tensorrt is not"):
        runner_for(bundle, foreign[0], "shared", 1)


def saved_files(cache: Path) -> dict[str, bytes]:
    (entry,) = cache.iterdir()
    return {path.name: path.read_bytes() for path in entry.iterdir()}


def run_mapped(bundle_path: Path) -> list[Any]:
    bundle = open_bundle(bundle_path)
    engine = bundle.manifest.engines[-1]
    with OnnxRuntimeRunner(bundle, engine, "mapped", 1) as runner:
        return runner.run(random_feeds(bundle.manifest.inputs, engine.bucket))


@pytest.mark.parametrize("name", ["engine.onnx", "engine.bin", "receipt.json"])
def test_a_changed_cache_never_answers(tiny_bundle: Path, private_cache: Path, name: str) -> None:
    first = run_mapped(tiny_bundle)
    (entry,) = private_cache.iterdir()
    assert entry.stat().st_mode & 0o077 == 0
    assert json.loads((entry / "receipt.json").read_text()).keys() == {"engine.onnx", "engine.bin"}
    good = saved_files(private_cache)
    raw = bytearray((entry / name).read_bytes())
    raw[len(raw) // 2] ^= 0x40
    (entry / name).write_bytes(raw)
    second = run_mapped(tiny_bundle)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert saved_files(private_cache) == good


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_polygraphy_opens_an_engine_as_it_lies(tiny_bundle: Path) -> None:
    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
    from polygraphy.logger import G_LOGGER

    bundle = open_bundle(tiny_bundle)
    engine = bundle.manifest.engines[0]
    feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
    with (
        G_LOGGER.verbosity(G_LOGGER.ERROR),
        OnnxrtRunner(SessionFromOnnx(str(tiny_bundle / engine.file))) as theirs,
        runner_for(bundle, engine, "shared", 1) as ours,
    ):
        found, expected = theirs.infer(feeds), ours.run(feeds)
        for spec, value in zip(bundle.manifest.outputs, expected, strict=True):
            np.testing.assert_allclose(found[spec.name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "spins_us"), [(Whole(), "50"), (Decode(), "200")])
def test_threads_look_longer_for_work_in_a_step(
    exits_bundle: Path, kind: EngineKind, spins_us: str, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = open_bundle(exits_bundle)
    runner = OnnxRuntimeRunner(bundle, replace(bundle.manifest.engines[0], kind=kind), "shared", 1)
    options = runner._options(OPTIMIZATION_LEVEL, packed=False)
    assert options.get_session_config_entry(SPIN_DURATION) == spins_us
    assert capfd.readouterr().err == ""  # ONNX Runtime warns of an entry that is made twice
