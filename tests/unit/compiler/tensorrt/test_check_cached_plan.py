"""Plans of KV-cache graphs, built and checked on tests/support/fake_tensorrt.py: no plan is really built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.bundle.device_files.plan_index import read_plans
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.tensorrt.build_bundle import build_plans
from nestforge.compiler.tensorrt.check_plan import check_cached_plan
from nestforge.errors import BuildError, ParityError
from nestforge.runtime.load import load
from support.gated_decoders import save_decoder
from support.generating import NARROW, generating_folder, played_gpu
from support.sealing import edit_manifest
from support.tiny_compile import board


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generating_folder(tmp_path_factory)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The graphs, to build in."""
    return Path(shutil.copytree(folder / "graphs", tmp_path / "bundle"))


def test_every_graph_has_a_plan_of_two_profiles_that_equals_it(folder: Path) -> None:
    bundle = open_bundle(folder / "plans", check="full")
    generation = bundle.manifest.generation
    assert generation is not None
    plans = {plan.graph: plan for plan in read_plans(bundle)}
    assert plans.keys() == {engine.file for engine in bundle.manifest.every_engine}
    for engine in generation.engines:
        plan = plans[engine.file]
        # Four texts of the gate in six rows, the longest that fits, and one that fills the cache.
        assert plan.parity.cases == 7
        assert plan.parity.max_abs < 1e-4, "both are ONNX Runtime here, on as many threads or fewer"
        assert plan.activation_bytes == 4096
        assert plan.options.strip_weights
        steps, chunks = json.loads((bundle.path / plan.file).read_bytes())["profiles"]
        assert (steps["input_ids"], chunks["input_ids"]) == (
            [[1, 1], [1, 1], [64, 9]],
            [[1, 1], [1, engine.capacity], [1, engine.capacity]],
        )
        heads = 3 if engine.submodel == NARROW else 4
        assert steps["past_value_1"] == [[rows, heads, engine.capacity, 8] for rows in (1, 1, 64)]
        assert (steps["logits_at"], chunks["logits_at"]) == ([[1], [1], [9]], [[1], [1], [engine.capacity]])


def test_what_is_done_is_kept_and_what_is_damaged_is_built_again(copy: Path, folder: Path) -> None:
    for plan in read_plans(open_bundle(folder / "plans")):
        shutil.copy(folder / "plans" / plan.file, copy)
    shutil.copy(folder / "plans" / "plans.json", copy)
    with played_gpu(folder) as world:
        assert all(plan.was_kept for plan in build_plans(copy))
        assert world.calls == []
        damaged = next(plan.file for plan in read_plans(open_bundle(copy)) if "cached40" in plan.graph)
        (copy / damaged).write_bytes(b"damaged")
        again = build_plans(copy)
        assert [plan.entry.file for plan in again if not plan.was_kept] == [damaged]
        assert world.calls.count("build") == 1


def test_weights_may_stay_in_the_plans(copy: Path, folder: Path) -> None:
    edit_manifest(copy, lambda data: data["provenance"]["profile"].update(tensorrt={"strip_weights": False}))
    with played_gpu(folder) as world:
        assert all(plan.entry.parity.max_abs < 1e-4 for plan in build_plans(copy))
        assert "refit" not in world.calls


def test_a_plan_that_answers_otherwise_is_refused_and_leaves_nothing(copy: Path, folder: Path) -> None:
    with played_gpu(folder) as world:
        whole = {engine.file for engine in open_bundle(copy).manifest.engines}
        build_plans(copy)
        files = sorted(path.name for path in copy.iterdir())
        edit_manifest(copy, lambda data: data["provenance"]["profile"].update(tensorrt={"optimization_level": 4}))
        world.off_by = 0.1
        with pytest.raises(ParityError, match=r"its plan: output \w+, case seed 0"):
            build_plans(copy)
        assert sorted(path.name for path in copy.iterdir()) == files
        bundle = open_bundle(copy)
        generation = bundle.manifest.generation
        assert generation is not None
        from nestforge.runtime.engines.tensorrt.cached_runner import TensorRTCacheRunner

        engine = generation.engines[0]
        plan = next(plan for plan in read_plans(bundle) if plan.graph == engine.file)
        assert plan.graph not in whole
        with (
            TensorRTCacheRunner(bundle, engine, plan=plan) as runner,
            pytest.raises(ParityError, match=rf"engine {engine.id}: its plan: output logits, case whole: max abs 0.1"),
        ):
            check_cached_plan(bundle, engine, runner, runner.device)


def test_a_window_is_seen_in_caches_that_keep_every_token(tmp_path: Path, folder: Path) -> None:
    model = save_decoder(tmp_path / "m", "mistral", sliding_window=5, head_dim=8, max_position_embeddings=40)
    common: dict[str, Any] = {"budgets": {"full": {}}, "buckets": ["1x8"]}
    options: dict[str, Any] = {"include": "budgets", "generate": True, "levels": {"ffn": (1.0,)}}
    device = board(backend="tensorrt", capacities=[16, 40], **common)
    bundle = nestforge.compile(model, device, tmp_path / "graphs", emit_only=True, **options)
    known = nestforge.compile(model, board(**common), tmp_path / "known", measure=False, **options)
    asked: dict[str, Any] = {"prompt": [[5, 7, 9], list(range(14))], "max_tokens": 20, "logprobs": 0}
    with played_gpu(folder):
        _, *cached = build_plans(bundle)
        assert [plan.entry.parity.cases for plan in cached] == [7, 7], "texts are longer than the window"
        with load(bundle, threads=1) as plans, load(known, threads=1) as processor:
            found, expected = (model.generate(**asked).rows for model in (plans, processor))
    for row, other in zip(found, expected, strict=True):
        assert row.tokens == other.tokens
        mine, theirs = ([each.token for each in one.log_probabilities or ()] for one in (row, other))
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_an_older_release_builds_the_other_plans_first_and_says_what_it_lacks(copy: Path, folder: Path) -> None:
    with played_gpu(folder, version="10.3.0"):
        with pytest.raises(BuildError) as raised:
            build_plans(copy)
        assert f"engine {NARROW}.cached16" in str(raised.value)
        assert "TensorRT 10.3.0 cannot build its graph: opset 24: expected 9 to 20; TensorScatter" in str(raised.value)
        assert "\n" not in str(raised.value)
        built = {plan.graph for plan in read_plans(open_bundle(copy))}
    assert built == {engine.file for engine in open_bundle(copy).manifest.engines}
