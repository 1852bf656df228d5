"""Ranges for TensorRT, from the checkpoint to the answer, on tests/support/fake_tensorrt.py: no plan is really run."""

import json
import shutil
from pathlib import Path
from typing import Any

import nestforge
import onnx
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.tensorrt.build_bundle import build_plans
from nestforge.errors import ExportError, ParityError
from nestforge.runtime.inputs.arrays import random_feeds
from support.cost_eff_models import save_tiny
from support.fake_cuda import World
from support.gated_decoders import save_decoder
from support.sealing import reseal
from support.tiny_compile import board, save_tiniest
from support.tiny_matlm import save_tiny_matlm
from support.tiny_models import save_tiny_matvit, save_tiny_vit

FULL: dict[str, Any] = {"budgets": {"full": {}}, "backend": "tensorrt"}
SHORT, LONG = Bucket(2, 8, 1, 1), Bucket(2, 16, 1, 9)


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranges of one submodel, so that each has kernels of its own."""
    folder = tmp_path_factory.mktemp("ranges")
    profile = board(**FULL, buckets=[str(SHORT), str(LONG)])
    return nestforge.compile(save_tiniest(folder / "model"), profile, folder / "b", include="budgets", emit_only=True)


@pytest.fixture
def compiled(emitted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(emitted, tmp_path / "own"))


def with_budget_at(folder: Path, shape: str) -> Path:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["provenance"]["profile"]["budget_at"] = shape
    (folder / "manifest.json").write_text(json.dumps(manifest))
    reseal(folder)
    return folder


def profiles_of(bundle: Path) -> dict[str, Any]:
    """By engine what its plan was built for."""
    return {
        plan.engine: json.loads((bundle / plan.entry.file).read_bytes())["profiles"][0] for plan in build_plans(bundle)
    }


def test_each_range_gets_one_plan_with_its_own_profile(compiled: Path, world: World) -> None:
    engines = open_bundle(compiled).manifest.engines
    assert {engine.bucket for engine in engines} == {SHORT, LONG}
    expected = {
        SHORT: [[1, 1], [1, 8], [2, 8]],  # smallest, tuned, largest
        LONG: [[1, 9], [1, 16], [2, 16]],
    }
    names = ["input_ids", "attention_mask", "token_type_ids"]
    wanted = {engine.id: dict.fromkeys(names, expected[engine.bucket]) for engine in engines}
    assert profiles_of(compiled) == wanted
    assert all(plan.was_kept for plan in build_plans(compiled))
    with_budget_at(compiled, "1x4")
    moved = {SHORT: [[1, 1], [1, 4], [2, 8]], LONG: [[1, 9], [1, 9], [2, 16]]}
    assert profiles_of(compiled) == {engine.id: dict.fromkeys(names, moved[engine.bucket]) for engine in engines}


def test_every_plan_is_compared_at_both_ends_and_between(compiled: Path, world: World) -> None:
    for plan, engine in zip(build_plans(compiled), open_bundle(compiled).manifest.engines, strict=True):
        assert plan.entry.parity.cases >= 6
        assert plan.entry.parity.max_abs < 1e-5
        least, most = engine.bucket.smallest, engine.bucket.largest
        for shape in (least, most, Bucket(least.batch, most.sequence), Bucket(most.batch, least.sequence)):
            assert f"shape {shape}" in world.calls
    world.off_by = 0.1
    with_budget_at(compiled, "1x2")
    with pytest.raises(ParityError, match=r"case seed 0 at 2x(8|16): max abs 0.1"):
        build_plans(compiled)


def test_a_request_runs_at_its_own_size_by_the_range_that_holds_it(compiled: Path, world: World) -> None:
    build_plans(compiled)
    with nestforge.load(compiled) as plans:
        for shape, bucket in (
            (Bucket(1, 1), SHORT),
            (Bucket(2, 8), SHORT),
            (Bucket(1, 9), LONG),
            (Bucket(2, 13), LONG),
        ):
            feeds = random_feeds(plans.bundle.manifest.inputs, shape, shape.tokens)
            world.calls.clear()
            answer = plans(feeds)
            assert (answer.bucket, answer.padding) == (bucket, None)
            assert world.calls[-1] == "run"
            assert "graph" not in world.calls
            for spec in plans.bundle.manifest.outputs:
                assert answer[spec.name].shape == spec.shape(shape)


FAMILIES = {
    # It counts tokens in whole numbers, which TensorRT does not.
    "roberta": (lambda folder: save_tiniest(folder, "roberta"), "1..2x1..8"),
    "llama": (save_decoder, "1..3x1..8"),
    "matlm": (save_tiny_matlm, "1..3x1..8"),
    "vit": (save_tiny_vit, "1..3x1"),
    "matvit": (save_tiny_matvit, "1..3x1"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_of_every_family_are_what_the_parser_takes(family: str, tmp_path: Path) -> None:
    """The compile itself asks the parser's table and refuses what it lacks."""
    save, bucket = FAMILIES[family]
    save(tmp_path / "m")
    profile = board(**FULL, buckets=[bucket])
    out = nestforge.compile(tmp_path / "m", profile, tmp_path / "b", include="budgets", emit_only=True)
    for engine in open_bundle(out).manifest.engines:
        (first, *_) = onnx.load(out / engine.file, load_external_data=False).graph.input
        assert first.type.tensor_type.shape.dim[0].dim_param == "batch"


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
def test_other_precisions_have_ranges_too(precision: str, tmp_path: Path, world: World) -> None:
    text = tmp_path / "texts"  # what activations of int8 are scaled by
    text.write_text("".join(f"the {word} fox jumps over {word} dogs\n" for word in map(str, range(200))))
    given = {"text": text} if precision == "int8" else {}
    profile = board(**FULL, precision=[precision], buckets=["1..2x1..8"])
    folder = save_tiniest(tmp_path / "m")
    out = nestforge.compile(folder, profile, tmp_path / "b", include="budgets", emit_only=True, **given)
    assert {engine.precision for engine in open_bundle(out).manifest.engines} == {precision}
    if precision != "bf16":  # ONNX Runtime, which plays TensorRT here, has no kernels for it
        assert all(plan.entry.parity.cases >= 5 for plan in build_plans(out))


def test_segments_of_a_chain_have_static_buckets(tmp_path: Path) -> None:
    save_tiny(tmp_path / "m")
    plan = nestforge.plan(tmp_path / "m", profile=board(**FULL, buckets=["1..4x1..16"]))
    assert [cost.bucket for cost in plan.candidates[0].costs] == [Bucket(1, 16), Bucket(4, 16)]
    reason = "on a GPU its segments hand on memory of one shape"
    assert f"static buckets 1x16, 4x16, to which inputs are padded: {reason}" in plan.notes
    with pytest.raises(ExportError) as raised:
        nestforge.plan(tmp_path / "m", profile=board(**FULL), buckets=[Bucket(4, 16, 1, 1)])
    assert str(raised.value) == f"bucket 1..4x1..16: {reason}; ask for static buckets, such as 4x16"
