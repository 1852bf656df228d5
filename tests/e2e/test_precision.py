"""Bundles in other precisions than fp32, through the whole road: compile, verify, answer."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from nestforge.bucket import Bucket
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler import compile as compile_module
from nestforge.compiler import job
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.graph import store
from nestforge.compiler.graph.encodings import encode, unpacked
from nestforge.compiler.graph.precision import quantize
from nestforge.compiler.graph.precision.proof_graphs import proof_bundle
from nestforge.compiler.planning.plan import Plan, make_plan
from nestforge.compiler.tensorrt.check_plan import check_plan
from nestforge.compiler.verify import verify_bundle
from nestforge.errors import BuildError, ParityError, PlanError
from nestforge.exporters import source
from nestforge.profiles.precision import FOUR_BITS, PRECISIONS, TRACED, Encoding, Precision, run_by
from nestforge.runtime.engines.onnxruntime.runner import OnnxRuntimeRunner
from nestforge.runtime.inputs.arrays import random_feeds
from nestforge.runtime.load import load
from nestforge.tools.cli import main
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.tiny_compile import board, save_tiniest
from support.tiny_mixer import save_tiny_mixer

# One 4-layer model wide enough for integers: at least 32 inputs and 16 outputs.
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiniest(tmp_path_factory.mktemp("wide") / "model", **SIZES)


def compiled(model: Path, output: Path, *precisions: str, **arguments: Any) -> Path:
    backend = arguments.pop("backend", "onnxruntime")
    profile = board(precision=list(precisions), backend=backend, buckets=["2x8"], budgets={"full": {}})
    return compile_bundle(model, profile, output, emit_only=backend == "tensorrt", **arguments)


LOWER = [precision for precision in run_by("onnxruntime") if precision != TRACED]


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory, wide: Path, text: Path) -> Bundle:
    """One bundle of every precision, two of one width among them. A model this small, halved and in 4 bits, answers by
    chance, so that it is whole."""
    path = tmp_path_factory.mktemp("every") / "b"
    return open_bundle(compiled(wide, path, TRACED, *LOWER, text=text, levels={"ffn": (1.0,)}), check="full")


def test_every_precision_stands_in_one_bundle_which_verifies(every: Bundle, wide: Path) -> None:
    assert {engine.precision for engine in every.manifest.engines} == {TRACED, *LOWER}
    assert verify_bundle(every.path, wide)


@pytest.mark.parametrize("encoding", FOUR_BITS)
def test_texts_choose_the_integers_of_4_bits(every: Bundle, wide: Path, encoding: Encoding) -> None:
    name = "encoder.layer.1.intermediate.dense.weight"
    with (
        safe_open(wide / "model.safetensors", framework="np") as model,
        safe_open(every.path / WEIGHTS_NAME, framework="np") as bundle,
    ):
        weight, integers = model.get_tensor(name), bundle.get_tensor(name + encoding)
        chosen = unpacked(integers, bundle.get_tensor(f"{name}{encoding}-scale"))[:, : weight.shape[1]]
    assert (integers != encode(weight, name + encoding)).any()
    assert np.corrcoef(chosen.ravel(), weight.ravel())[0, 1] > 0.98


def test_another_models_weights_are_a_verdict_on_every_engine(every: Bundle, wide: Path, tmp_path: Path) -> None:
    """Of integers it is the weight that says so, before any answer is compared."""
    other = Path(shutil.copytree(wide, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["pooler.dense.weight"] *= -1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    report = verify_bundle(every.path, other)
    problems = {one.id: verdict.problem for one, verdict in zip(every.manifest.engines, report.engines, strict=True)}
    assert all(problems.values())
    (four,) = {problems[engine.id] for engine in every.manifest.engines if engine.precision == "int4"}
    assert (
        four == "weight pooler.dense.weight.int4: its numbers are further from the model's than rounding can leave them"
    )


def test_a_model_that_is_nearly_the_bundles_is_another(every: Bundle, wide: Path, tmp_path: Path) -> None:
    """By a tenth of a weight's size; but not where examples chose its integers, which may be as far from it."""
    other = Path(shutil.copytree(wide, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    weight = tensors["pooler.dense.weight"]
    weight += 0.1 * weight.std() * np.random.default_rng(0).standard_normal(weight.shape, np.float32)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    plain = open_bundle(compiled(wide, tmp_path / "b", "int8-dynamic", "int4", levels={"ffn": (1.0,)}))
    assert verify_bundle(plain.path, wide)
    for bundle, sees_4_bits in ((plain, True), (every, False)):
        report = verify_bundle(bundle.path, other)
        problems = {one.precision: v.problem for one, v in zip(bundle.manifest.engines, report.engines, strict=True)}
        own = r"weight pooler\.dense\.weight\.int\d-scale: the bundle has other numbers than are made of the model's"
        assert re.fullmatch(own, str(problems["int8-dynamic"]))
        assert bool(re.fullmatch(own, str(problems["int4"]))) == sees_4_bits


@pytest.mark.parametrize("low", LOWER)
def test_another_precision_is_smaller_and_answers_nearly_alike(every: Bundle, low: Precision) -> None:
    submodels = {entry.label: entry for entry in every.manifest.submodels}
    whole, narrow = submodels["100%"], submodels[f"100%.{low}"]
    assert (narrow.precision, narrow.id) == (low, f"{whole.id}.{low}")
    # Of 32 inputs, and 64, a block of 128 holds no more than those.
    most = {".fp16": 0.55, ".bf16": 0.55, ".int4-g128": 0.47}.get(PRECISIONS[low].encoding, 0.45)
    assert narrow.weight_bytes < most * whole.weight_bytes
    assert whole.quality.figures["mean_cosine"] == 1.0
    assert 0.93 < narrow.quality.figures["mean_cosine"] < 1.0, "what the precision costs is shown, and is something"
    feeds = {"input_ids": np.ones((2, 8), np.int64), "attention_mask": np.ones((2, 8), np.int64)}
    feeds |= {spec.name: np.zeros((2, 8), np.int64) for spec in every.manifest.inputs if spec.name not in feeds}
    with load(every.path) as model:
        exact, near = model(feeds), model(feeds, submodel=narrow.id)
    assert exact.submodel == whole.id, "the highest precision answers where nothing is asked"
    assert near.submodel == narrow.id
    name = every.manifest.outputs[0].name
    assert not np.array_equal(exact.outputs[name], near.outputs[name])
    e, n = exact.outputs[name].ravel(), near.outputs[name].ravel()  # of tokens that no example has
    assert e @ n > 0.9 * np.linalg.norm(e) * np.linalg.norm(n)


def test_all_submodels_share_the_weights_of_a_precision(tmp_path: Path, wide: Path) -> None:
    path = compiled(wide, tmp_path / "b", "fp16")
    with safe_open(path / WEIGHTS_NAME, framework="np") as store:
        dtypes = {name: store.get_slice(name).get_dtype() for name in store.keys()}  # noqa: SIM118  (no mapping)
    assert {dtype for name, dtype in dtypes.items() if name.endswith(".fp16")} == {"F16"}
    assert not any(name + ".fp16" in dtypes for name in dtypes), "nothing stands there twice"
    read: dict[str, set[tuple[int, int]]] = {}
    for file in path.glob("*.onnx"):
        for tensor in onnx.load(file, load_external_data=False).graph.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if place:
                read.setdefault(tensor.name, set()).add((int(place["offset"]), int(place["length"])))
    assert all(len({offset for offset, _ in views}) == 1 for views in read.values())
    assert any(len(views) > 1 for views in read.values()), "some submodel reads a prefix"


def test_bfloat16_is_proven_by_an_emulation_which_is_not_published(tmp_path: Path, wide: Path) -> None:
    bundle = open_bundle(compiled(wide, tmp_path / "b", "bf16", backend="tensorrt"), check="full")
    assert {path.name for path in bundle.path.glob("*.onnx")} == {engine.file for engine in bundle.manifest.engines}
    assert {(engine.precision, engine.backend) for engine in bundle.manifest.engines} == {("bf16", "tensorrt")}
    graph = onnx.load(bundle.file(bundle.manifest.engines[0].file), load_external_data=False).graph
    types = {tensor.data_type for tensor in graph.initializer}
    assert onnx.TensorProto.BFLOAT16 in types
    report = verify_bundle(bundle.path, wide)
    assert report, [verdict.problem for verdict in report.engines]
    with proof_bundle(bundle) as here, OnnxRuntimeRunner(here, here.manifest.engines[0], "shared", 1) as plan:
        assert check_plan(here, bundle.manifest.engines[0], plan).max_abs == 0, (
            "plans are checked against the emulation"
        )


def test_int8_for_tensorrt_is_standard_quantisation(tmp_path: Path, wide: Path, text: Path) -> None:
    bundle = open_bundle(compiled(wide, tmp_path / "b", "int8", backend="tensorrt", text=text))
    for engine in bundle.manifest.engines:
        nodes = onnx.load(bundle.file(engine.file), load_external_data=False).graph.node
        assert {node.domain for node in nodes} <= {"", "ai.onnx"}
        assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in nodes}
    assert verify_bundle(bundle.path, wide)


def test_routes_of_a_mixer_in_half_precision_are_replayed(tmp_path: Path) -> None:
    two = {"num_hidden_layers": 2, "attention_layers": (1,), "moe_layers": (0,)}
    folder = save_tiny_mixer(tmp_path / "mixer", **two)
    profile = board(precision="fp16", buckets=["2x16"], budgets={"full": {}})
    path = compile_bundle(folder, profile, tmp_path / "b", include="budgets")
    receipts = [engine.parity for engine in open_bundle(path).manifest.engines]
    assert all(receipt and receipt.routing for receipt in receipts)
    assert verify_bundle(path, folder)


def test_an_interrupted_compile_goes_on_in_its_precision(tmp_path: Path, wide: Path, text: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if stage == "build" and done == total - 1:
            raise KeyboardInterrupt

    whole: dict[str, Any] = {"text": text, "levels": {"ffn": (1.0,)}}
    with pytest.raises(KeyboardInterrupt):
        compiled(wide, tmp_path / "b", "fp32", "int8", progress=stop, **whole)
    resumed = compiled(wide, tmp_path / "b", "fp32", "int8", **whole)
    fresh = compiled(wide, tmp_path / "c", "fp32", "int8", **whole)
    assert (resumed / "manifest.json").read_bytes() == (fresh / "manifest.json").read_bytes()


# Refusals.


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("int8", "activations are scaled by what examples show; pass `text` or `data`, or use int8-dynamic"),
        ("int4-g128", "numbers are chosen by what examples show; pass `text` or `data`, or use int4"),
    ],
)
def test_a_precision_asks_for_examples_before_any_work(
    tmp_path: Path, wide: Path, precision: str, expected: str
) -> None:
    with pytest.raises(BuildError, match=f"^precision {precision}: {expected}, which needs none$"):
        compiled(wide, tmp_path / "b", precision)
    assert list(tmp_path.iterdir()) == []


def test_a_value_beyond_float16_is_named(tmp_path: Path) -> None:
    folder = save_tiniest(tmp_path / "model")
    scale_weights(folder, "encoder.layer.1.intermediate.dense.weight", 1e7)
    with pytest.raises(
        BuildError, match=r"^precision fp16: .*reaches .*, and a float16 ends at 65504; use fp32, or for T"
    ):
        compiled(folder, tmp_path / "b", "fp16")
    assert not (tmp_path / "b").exists()


def test_a_wrong_scale_of_weights_fails_the_gate(tmp_path: Path, wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = store.encode
    monkeypatch.setattr(
        store,
        "encode",
        lambda array, name, scale: honest(array, name, scale) * (np.float32(2) if name.endswith("-scale") else 1),
    )
    message = r"^weight embeddings\S+\.int8: its numbers are further from the model's than rounding can leave them"
    with pytest.raises(ParityError, match=message):
        compiled(wide, tmp_path / "b", "int8-dynamic")


@pytest.mark.parametrize("precision", ["int8", "int8-dynamic", "int4"])
def test_a_dropped_bias_fails_the_gate_though_the_angle_hardly_changes(
    tmp_path: Path, wide: Path, text: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than the rounding of activations moves an answer by, and found all the same, in the module that has it."""
    weight = "encoder.layer.1.intermediate.dense.weight"
    for name in ("_integer_product", "_blocked_product"):
        honest = getattr(quantize, name)

        def without_bias(edit: Any, product: Any, *rest: Any, honest: Any = honest) -> None:
            honest(edit, replace(product, bias=None) if product.weight == weight else product, *rest)

        monkeypatch.setattr(quantize, name, without_bias)
    message = r"without the rounding of activations: .*first to diverge: encoder\.layer\.1\.intermediate\.dense"
    with pytest.raises(ParityError, match=message):
        compiled(wide, tmp_path / "b", precision, text=text)


@pytest.mark.parametrize(
    ("precision", "bucket"),
    [("int8-dynamic", "1..4x1..8"), ("int8-dynamic", "4x8"), ("int4", "1..4x1..8")],
    ids=["in company", "with the fill of a static bucket", "int4, in company"],
)
def test_a_row_is_what_it_is_alone(tmp_path: Path, wide: Path, precision: str, bucket: str) -> None:
    """Rows of other lengths beside it, and what fills a bucket, have scales of their own."""
    profile = board(precision=[precision], buckets=[bucket], budgets={"full": {}})
    lengths = np.array([8, 3, 5, 1])
    with load(compile_bundle(wide, profile, tmp_path / "b", include="budgets")) as model:
        feeds = random_feeds(model.bundle.manifest.inputs, Bucket(4, 8), seed=1)
        feeds["attention_mask"] = (np.arange(8) < lengths[:, None]).astype(np.int64)
        together = model(feeds)["last_hidden_state"]
        for row, length in enumerate(lengths):
            one = {name: np.ascontiguousarray(array[row : row + 1, :length]) for name, array in feeds.items()}
            np.testing.assert_allclose(model(one)["last_hidden_state"][0], together[row, :length], atol=1e-5)


@pytest.mark.parametrize("precision", ["int8-dynamic", "fp16"])
def test_a_memory_budget_is_judged_by_the_bytes_that_are_built(
    tmp_path: Path, wide: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Headers expect far too much here, or nothing: neither refuses a submodel or lets one through."""
    plans: list[Plan] = []
    monkeypatch.setattr(job, "make_plan", lambda *a, **k: plans.append(make_plan(*a, **k)) or plans[-1])
    compiled(wide, tmp_path / "free", precision)
    planned = {candidate.id: candidate for candidate in plans[-1].candidates}
    for entry in open_bundle(tmp_path / "free").manifest.submodels:
        assert planned[entry.id].weight_bytes == entry.weight_bytes
    smallest = plans[-1].candidates[0]

    def compile_within(memory_mb: float, expected: tuple[str, ...], name: str) -> str:
        monkeypatch.setattr(source, "expected_encodings", lambda *_: expected)
        budgets = {"tight": {"memory_mb": memory_mb}}
        profile = board(precision=precision, buckets=["2x8"], budgets=budgets)
        return open_bundle(compile_bundle(wide, profile, tmp_path / name)).manifest.budgets[0].submodel

    assert compile_within(smallest.memory_mb, ("", "", ""), "exact") == smallest.id
    with pytest.raises(
        PlanError, match=rf"^budget 'tight': not even the smallest submodel {smallest.label} fits: memory"
    ):
        compile_within(smallest.memory_mb - 1e-6, (), "less")
    assert not (tmp_path / "less").exists()


def test_a_published_slice_is_one_in_the_highest_precision(tmp_path: Path, wide: Path) -> None:
    bundle = open_bundle(compiled(wide, tmp_path / "b", "fp32", "int8-dynamic", slices=[wide], include="budgets"))
    assert {submodel.precision for submodel in bundle.manifest.submodels} == {"fp32"}
    assert bundle.manifest.ranking.method == "none", "a slice is a prefix of the folder's order"


def test_a_compile_in_bfloat16_goes_on_wherever_it_was_stopped(tmp_path: Path, wide: Path) -> None:
    """Its proof graphs lie in the working folder, where a later run finds them."""
    for stage in ("quality", "prove", "verify"):

        def stop(reached: str, done: int, _total: int, stage: str = stage) -> None:
            if (reached, done) == (stage, 0):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            compiled(wide, tmp_path / "b", "bf16", backend="tensorrt", progress=stop)
    resumed = compiled(wide, tmp_path / "b", "bf16", backend="tensorrt")
    assert {path.name for path in resumed.glob("*.onnx")} == {e.file for e in open_bundle(resumed).manifest.engines}
    assert verify_bundle(resumed, wide)


def test_the_build_record_is_written_once_with_the_seconds_of_every_stage(
    tmp_path: Path, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = compile_module.write_build_record, []

    def counted(*arguments: Any) -> None:
        calls.append(arguments)
        honest(*arguments)

    monkeypatch.setattr(compile_module, "write_build_record", counted)
    bundle = open_bundle(compiled(wide, tmp_path / "b", "fp32"), check="full")
    assert len(calls) == 1
    assert {"build", "prove", "verify"} <= set(bundle.build.seconds)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "fp8"], f"'fp8': expected some of {', '.join(PRECISIONS)}"),
        (["--precision", "bf16"], "precision: bf16 does not run on onnxruntime"),
        (["--precision", "int8,int8"], "precision: int8 is named twice"),
    ],
)
def test_bad_precisions_on_the_command_line(
    tmp_path: Path, wide: Path, profile: Path, arguments: list[str], message: str
) -> None:
    for command in (["compile", str(wide), "--output", str(tmp_path / "b")], ["plan", str(wide)]):
        result = CliRunner().invoke(main, [*command, "--profile", str(profile), *arguments])
        assert result.exit_code != 0
        assert message in " ".join(result.output.split())


def scale_weights(folder: Path, name: str, factor: float) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name] * factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
