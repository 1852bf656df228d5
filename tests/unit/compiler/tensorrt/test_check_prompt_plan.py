"""Plans of an encoder-decoder, built and checked on tests/support/fake_tensorrt.py: no plan is really built."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from nestforge.bundle.device_files.plan_index import read_plans
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.tensorrt import check_plan
from nestforge.compiler.tensorrt.build_bundle import build_plans, plan_engines
from nestforge.errors import ParityError
from support.generating import few_prompt_tokens, played_gpu, source_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_folder(tmp_path_factory)


def test_encoder_and_decoder_have_plans_that_equal_their_graphs(folder: Path) -> None:
    bundle = open_bundle(folder / "t5" / "plans", check="full")
    generation = bundle.manifest.generation
    assert generation is not None
    assert generation.encoder is not None
    plans = {plan.graph: plan for plan in read_plans(bundle)}
    assert [engine.segment for engine in plan_engines(bundle)] == [*[None] * 2, *["encoder"] * 2, *["cached"] * 4]
    for engine in generation.every_engine:
        plan = plans[engine.file]
        assert plan.parity.max_abs < 1e-4, "both are ONNX Runtime here, on as many threads or fewer"
        steps, *chunks = json.loads((bundle.path / plan.file).read_bytes())["profiles"]
        if engine.segment == "encoder":
            # The ends of what is affordable here, the powers of two between, and some at random.
            assert plan.parity.cases >= 8
            assert plan.activation_bytes == 64 * 512**2, "what a prompt of 512 tokens takes"
            assert (steps, chunks) == ({"input_ids": [[1, 1], [1, 512], [1, 4096]]}, [])
        else:
            assert plan.parity.cases == 7
            assert steps["source_value_1"] == [[1, 3, 1, 8], [1, 3, 512, 8], [64, 3, 4096, 8]]
            assert chunks[0]["source_key_0"] == [[1, 3, 8, 1], [1, 3, 8, 512], [1, 3, 8, 4096]]


def test_an_encoder_that_answers_otherwise_is_refused_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder / "t5" / "plans", tmp_path / "b"))
    bundle = open_bundle(copy)
    encoders = {engine.file: engine for engine in plan_engines(bundle) if engine.segment == "encoder"}
    of_encoders = [plan for plan in read_plans(bundle) if plan.graph in encoders]
    for plan in of_encoders:
        (copy / plan.file).unlink()
    with played_gpu(folder / "t5") as world, few_prompt_tokens():
        world.off_by = 0.1
        with pytest.raises(ParityError, match=r"encoder@b1-s1_4096: its plan: output source_key_0, case seed 0 at 1x"):
            build_plans(copy)
        assert not any((copy / plan.file).exists() for plan in of_encoders)
        world.off_by = 0.0
        assert [built.engine for built in build_plans(copy) if not built.was_kept] == [
            engine.id for engine in encoders.values()
        ]


def test_a_decoder_that_reads_another_prompt_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both read the output of the encoder's graph for each row's own prompt."""
    from nestforge.compiler.parity import cached_cases

    bundle = open_bundle(folder / "t5" / "plans")
    generation = bundle.manifest.generation
    assert generation is not None
    engine = generation.engines[0]
    copied = cached_cases.DeviceSource.copied

    def shorter(source: object, device: object) -> object:
        found = copied(source, device)  # type: ignore[arg-type]
        found.lengths[-1] = max(1, found.lengths[-1] - 1)
        return found

    monkeypatch.setattr(cached_cases.DeviceSource, "copied", staticmethod(shorter))
    with played_gpu(folder / "t5"):
        from nestforge.compiler.graph.precision.proof_graphs import proof_bundle
        from nestforge.compiler.tensorrt.check_plan import check_cached_plan
        from nestforge.runtime.engines.tensorrt.cached_runner import TensorRTCacheRunner

        with (
            TensorRTCacheRunner(bundle, engine) as plan,
            proof_bundle(bundle) as here,
            pytest.raises(ParityError, match=rf"engine {engine.id}: its plan: output"),
        ):
            check_cached_plan(here, engine, plan, plan.device)


def test_the_longest_prompt_is_checked_where_its_scores_are_affordable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, asked = open_bundle(folder / "t5" / "plans"), []
    monkeypatch.setattr(check_plan, "check_plan", lambda *given: asked.append(given[3][0]))
    (engine, *_) = [engine for engine in plan_engines(bundle) if engine.segment == "encoder"]
    for heads in (3, 12):
        layers = tuple(replace(layer, heads=heads) for layer in bundle.manifest.generation.layers)
        wide = replace(bundle.manifest, generation=replace(bundle.manifest.generation, layers=layers))
        check_plan.check_prompt_plan(replace(bundle, manifest=wide), engine, None, None)
    assert [str(shape) for shape in asked] == ["1x4096", "1x2886"]
