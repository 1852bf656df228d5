"""Plans of graphs, of KV-cache graphs and of encoder-decoders, checked on tests/support/fake_tensorrt.py: no plan is
really built."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.bundle.device_files.plan_index import read_plans
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.graph.precision.proof_graphs import with_proof_graphs
from nestforge.compiler.tensorrt import check_plan as check_plan_module
from nestforge.compiler.tensorrt.build_bundle import build_plans, plan_engines
from nestforge.compiler.tensorrt.check_plan import check_cached_plan, check_plan
from nestforge.errors import BuildError, ParityError
from nestforge.runtime.engines.onnxruntime.runner import OnnxRuntimeRunner
from nestforge.runtime.inputs.arrays import Array
from nestforge.runtime.load import load
from support.gated_decoders import save_decoder
from support.generating import NARROW, few_prompt_tokens, generating_folder, played_gpu, source_folder
from support.sealing import edit_manifest
from support.tiny_compile import board

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "bundle-experts"
ENCODER_DECODER = GOLDEN.with_name("bundle-conditional")


class Plan(OnnxRuntimeRunner):
    """The graph itself, but for the cases (by number) whose outputs or routes it gets wrong."""

    def __init__(self, bundle: Bundle, engine: EngineEntry, outputs: set[int], routing: set[int]) -> None:
        super().__init__(bundle, engine, "shared", 1)
        self.wrong, self.case = (outputs, routing), -1

    def run(self, feeds: Mapping[str, Array], routing: bool = False) -> list[Array]:
        found = super().run(feeds, routing)
        self.case += 1
        for wrong, array in zip(self.wrong, (found[0], found[-1]), strict=True):
            array += self.case in wrong
        return found


@pytest.mark.parametrize(
    ("outputs", "routing", "left_out", "runs"),
    [
        (set(), set(), 0, 4),
        (set(), {0, 1, 2, 3}, 0, 4),  # what equal outputs were decided by does not matter
        ({1, 3}, {1, 3}, 2, 6),
        ({0, 1, 2, 3}, {0, 1, 2, 3}, 4, 8),
    ],
)
def test_cases_that_decide_otherwise_make_room(outputs: set[int], routing: set[int], left_out: int, runs: int) -> None:
    bundle = open_bundle(GOLDEN)
    with Plan(bundle, bundle.manifest.engines[0], outputs, routing) as plan:
        parity = check_plan(with_proof_graphs(bundle, bundle.path), plan.engine, plan)
        assert (parity.cases, parity.left_out, plan.case + 1) == (4, left_out, runs)
    assert (parity.max_abs, np.round(parity.min_cosine, 9)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("outputs", "routing", "message"),
    [
        ({2}, set(), r"its plan: output \w+, case seed 2 at [0-9]+x[0-9]+: max abs 1, .*; allowed abs <="),
        ({2}, {0, 1}, r"its plan: output \w+, case seed 2 at [0-9]+x[0-9]+: max abs 1, "),
        (set(range(5)), set(range(5)), "its plan decides otherwise than its graph in 5 of 8 cases, more than equal"),
    ],
)
def test_other_outputs_from_the_same_decisions_are_refused(outputs: set[int], routing: set[int], message: str) -> None:
    bundle = open_bundle(GOLDEN)
    engine = bundle.manifest.engines[0]
    with Plan(bundle, engine, outputs, routing) as plan, pytest.raises(ParityError, match=message) as raised:
        check_plan(with_proof_graphs(bundle, bundle.path), engine, plan)
    assert str(raised.value).startswith(f"engine {engine.id}: ")


class WrongBehind(OnnxRuntimeRunner):
    """The graph, but for logits at places that the encoder's mask leaves out."""

    def run(self, feeds: Mapping[str, Array], routing: bool = False) -> list[Array]:
        found = super().run(feeds, routing)
        found[0] += feeds["attention_mask"][:, :, None] == 0
        return found


def test_an_encoders_mask_leaves_out_no_output_of_the_decoder() -> None:
    bundle = open_bundle(ENCODER_DECODER)
    engine = bundle.manifest.engines[0]
    with WrongBehind(bundle, engine, "shared", 1) as plan, pytest.raises(ParityError, match="output logits, case seed"):
        check_plan(with_proof_graphs(bundle, bundle.path), engine, plan)


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


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_folder(tmp_path_factory)


def test_encoder_and_decoder_have_plans_that_equal_their_graphs(sources: Path) -> None:
    bundle = open_bundle(sources / "t5" / "plans", check="full")
    generation = bundle.manifest.generation
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


def test_an_encoder_that_answers_otherwise_is_refused_and_leaves_nothing(sources: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sources / "t5" / "plans", tmp_path / "b"))
    bundle = open_bundle(copy)
    encoders = {engine.file: engine for engine in plan_engines(bundle) if engine.segment == "encoder"}
    of_encoders = [plan for plan in read_plans(bundle) if plan.graph in encoders]
    for plan in of_encoders:
        (copy / plan.file).unlink()
    with played_gpu(sources / "t5") as world, few_prompt_tokens():
        world.off_by = 0.1
        with pytest.raises(ParityError, match=r"encoder@b1-s1_4096: its plan: output source_key_0, case seed 0 at 1x"):
            build_plans(copy)
        assert not any((copy / plan.file).exists() for plan in of_encoders)
        world.off_by = 0.0
        assert [built.engine for built in build_plans(copy) if not built.was_kept] == [
            engine.id for engine in encoders.values()
        ]


def test_a_decoder_that_reads_another_prompt_is_refused(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both read the output of the encoder's graph for each row's own prompt."""
    from nestforge.compiler.parity import cached_cases

    bundle = open_bundle(sources / "t5" / "plans")
    generation = bundle.manifest.generation
    engine = generation.engines[0]
    copied = cached_cases.DeviceSource.copied

    def shorter(source: object, device: object) -> object:
        found = copied(source, device)
        found.lengths[-1] = max(1, found.lengths[-1] - 1)
        return found

    monkeypatch.setattr(cached_cases.DeviceSource, "copied", staticmethod(shorter))
    with played_gpu(sources / "t5"):
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
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, asked = open_bundle(sources / "t5" / "plans"), []
    monkeypatch.setattr(check_plan_module, "check_plan", lambda *given: asked.append(given[3][0]))
    (engine, *_) = [engine for engine in plan_engines(bundle) if engine.segment == "encoder"]
    for heads in (3, 12):
        layers = tuple(replace(layer, heads=heads) for layer in bundle.manifest.generation.layers)
        wide = replace(bundle.manifest, generation=replace(bundle.manifest.generation, layers=layers))
        check_plan_module.check_prompt_plan(replace(bundle, manifest=wide), engine, None, None)
    assert [str(shape) for shape in asked] == ["1x4096", "1x2886"]


def test_a_plan_is_refused_in_one_line_where_onnx_runtime_is_missing() -> None:
    program = """
import sys
sys.modules["onnxruntime"] = None
from importlib import util
found = util.find_spec
util.find_spec = lambda name: None if name == "onnxruntime" else found(name)
from types import SimpleNamespace
from nestforge.compiler.tensorrt.check_plan import graph_in_onnx_runtime
from nestforge.errors import BuildError
try:
    graph_in_onnx_runtime(SimpleNamespace(id="e"))
except BuildError as refusal:
    print(refusal)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said == "engine e: a plan is checked against ONNX Runtime here; install onnxruntime\n"
