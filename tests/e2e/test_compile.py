"""The whole road on a tiny real checkpoint: compile, load without torch, answers equal to PyTorch's."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import onnx
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler import compile
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.engines import build_engine
from nestforge.compiler.engines import templates as templates_module
from nestforge.compiler.examples import rank_axes
from nestforge.compiler.graph import make_template
from nestforge.compiler.graph import store as store_module
from nestforge.compiler.graph.store import read_store, recover_order
from nestforge.compiler.graph.template import Template
from nestforge.compiler.verify import verify_bundle
from nestforge.errors import BundleCorruptError, ParityError, SliceError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal, permute_axis
from nestforge.profiles.probe_host import _fingerprint, probe_host
from nestforge.runtime.engines import measure as measuring
from nestforge.runtime.inputs.arrays import random_feeds
from support.tiny_compile import BUCKET, board, template_of

# Two compiles of the same inputs may differ in these.
RECORDS = {"build.json", "report.md"}


def contents(bundle: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in bundle.iterdir() if path.name not in RECORDS}


@pytest.fixture(scope="module")
def reference(compiled: Any) -> UniversalModel:
    """The user's model, its steps put into the bundle's order by their bytes alone."""
    universal = load_universal(open_source(compiled.model))
    for axis, order in recover_order([compiled.bundle / "weights.safetensors"], universal).items():
        permute_axis(universal, axis, order)
    return universal


def expected(reference: UniversalModel, submodel: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    module = reference.narrow(reference.spec.parse(submodel))
    names = [spec.name for spec in reference.source.signature.outputs]
    return dict(zip(names, (t.numpy() for t in module(*map(torch.from_numpy, feeds.values()))), strict=True))


SUBMODELS = ["ffn8-heads1", "ffn16-heads1", "ffn24-heads2", "ffn8x1_24x1-heads2x1_1x1", "ffn32-heads2"]


@pytest.mark.parametrize("residency", ["shared", "packed"])
def test_every_engine_answers_as_pytorch_does(compiled: Any, reference: UniversalModel, residency: Any) -> None:
    with nestforge.load(compiled.bundle, residency=residency, threads=1) as loaded:
        assert {entry.id for entry in loaded.bundle.manifest.submodels} == set(SUBMODELS)
        for engine in loaded.bundle.manifest.engines:
            feeds = random_feeds(reference.source.signature.inputs, engine.bucket, seed=99)
            answer = loaded(feeds, submodel=engine.submodel)
            assert (answer.engine, answer.padding) == (engine.id, None)
            for name, array in expected(reference, engine.submodel, feeds).items():
                np.testing.assert_allclose(answer[name], array, atol=2e-5, rtol=1e-4)


def test_the_universal_engine_answers_as_the_users_own_module(compiled: Any) -> None:
    """Before any ranking: what was permuted must not show."""
    universal = load_universal(open_source(compiled.model))
    feeds = random_feeds(universal.source.signature.inputs, Bucket(2, 16), seed=5)
    with nestforge.load(compiled.bundle, threads=1) as loaded:
        answer = loaded(feeds)
    assert answer.submodel == "ffn32-heads2"
    for name, array in expected(universal, "ffn32-heads2", feeds).items():
        np.testing.assert_allclose(answer[name], array, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 5), (1, 9), (2, 7), (2, 16)])
def test_a_smaller_request_is_padded_and_answers_as_unpadded_pytorch(
    compiled: Any, reference: UniversalModel, rows: int, length: int
) -> None:
    feeds = random_feeds(reference.source.signature.inputs, Bucket(rows, length), seed=3)
    feeds["attention_mask"][:] = 1
    with nestforge.load(compiled.bundle, threads=1) as loaded:
        answer = loaded(feeds, submodel="M")
    assert answer.bucket == (Bucket(1, 8) if (rows, length) in {(1, 1), (1, 5)} else Bucket(2, 16))
    for name, array in expected(reference, answer.submodel, feeds).items():
        np.testing.assert_allclose(answer[name], array, atol=2e-5, rtol=1e-4)


def test_text_goes_in_and_an_embedding_comes_out(compiled: Any, reference: UniversalModel) -> None:
    with nestforge.load(compiled.bundle, threads=1) as loaded:
        answer = loaded(["The quick brown fox", "dog"], submodel="XL")
    ids = np.array([[2, 4, 6, 7, 8, 3], [2, 12, 3, 0, 0, 0]])
    feeds = {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64), "token_type_ids": 0 * ids}
    embedding = expected(reference, "ffn32-heads2", feeds)["sentence_embedding"]
    np.testing.assert_allclose(answer["sentence_embedding"], embedding, atol=2e-5)
    np.testing.assert_allclose(np.linalg.norm(answer["sentence_embedding"], axis=1), 1, atol=1e-6)


def test_budgets_hold_and_labels_name_their_submodels(compiled: Any) -> None:
    with nestforge.load(compiled.bundle, threads=1) as loaded:
        manifest = loaded.bundle.manifest
        largest = {e.submodel: e.flops for e in manifest.engines if e.bucket == Bucket(2, 16)}
        half = loaded("the fox", budget="half")
        assert loaded("the fox", budget="full").submodel == "ffn32-heads2"
        assert {label: loaded("a", submodel=label).submodel for label in ("S", "M", "L", "XL")} == dict(
            zip(("S", "M", "L", "XL"), ("ffn8-heads1", "ffn16-heads1", "ffn24-heads2", "ffn32-heads2"), strict=True)
        )
    assert largest[half.submodel] <= 0.6 * largest["ffn32-heads2"]
    assert largest["ffn24-heads2"] > 0.6 * largest["ffn32-heads2"], "the budget rules something out"


def test_ranking_and_quality_are_recorded(compiled: Any) -> None:
    manifest = open_bundle(compiled.bundle, "full").manifest
    assert (manifest.ranking.method, manifest.ranking.samples) == ("taylor", 128)
    quality = {entry.id: entry.quality for entry in manifest.submodels}
    assert all(found is not None and found.samples >= 60 for found in quality.values())
    cosines = [quality[name].figures["mean_cosine"] for name in ("ffn8-heads1", "ffn24-heads2", "ffn32-heads2")]
    assert cosines == sorted(cosines)
    assert cosines[-1] == pytest.approx(1.0)
    assert quality["ffn32-heads2"].figures["recall_at_10"] == 1.0
    assert manifest.ranking.data_sha256 not in {found.data_sha256 for found in quality.values()}, "held out"


def test_nothing_is_measured_for_a_device_that_is_not_this_host(compiled: Any) -> None:
    latencies = open_bundle(compiled.bundle).build.latencies
    assert len(latencies) == 10
    assert all(latency.largest.predicted_ms > 0 and not latency.is_measured for latency in latencies)


def test_progress_names_every_stage_in_order(compiled: Any) -> None:
    stages = list(dict.fromkeys(stage for stage, _, _ in compiled.events))
    assert stages == [
        *("load", "rank", "trace", "store", "measure", "build", "quality", "bench", "prove", "hash", "verify")
    ]
    for stage in stages:
        assert (stage, 1, 1) in compiled.events
    assert all(0 <= done <= total for _, done, total in compiled.events)
    assert ("build", 9, 10) in compiled.events


def test_every_engine_is_sliced_and_views_one_store(compiled: Any) -> None:
    manifest = open_bundle(compiled.bundle).manifest
    assert {engine.emitted for engine in manifest.engines} == {"sliced"}
    sizes = {entry.path: entry.bytes for entry in manifest.files}
    parameters = manifest.submodel("XL").weight_bytes
    assert parameters <= sizes["weights.safetensors"] < 1.2 * parameters + 4096
    assert all(engine.private_bytes < 2_000 for engine in manifest.engines)


def test_a_nested_model_keeps_its_order_and_uses_its_own_levels(model: Path, tmp_path: Path) -> None:
    nested = Path(shutil.copytree(model, tmp_path / "nested"))
    config = json.loads((nested / "config.json").read_text())
    (nested / "config.json").write_text(json.dumps(config | {"nested": True}))
    bundle = compile_bundle(nested, board(), tmp_path / "out")
    manifest = open_bundle(bundle).manifest
    assert (manifest.trained_nested, manifest.ranking.method) == (True, "none")
    # 1/8, 1/4, 1/2, 1 of 32 neurons in multiples of 8, of 2 heads in whole ones
    assert [entry.id for entry in manifest.submodels] == ["ffn8-heads1", "ffn16-heads1", "ffn32-heads2"]
    assert manifest.submodel("S") == manifest.submodel("M")
    store, universal = (bundle / "weights.safetensors").read_bytes(), load_universal(open_source(nested))
    index = read_store([bundle / "weights.safetensors"], universal.spec)
    bias = universal.parameters()["encoder.layer.0.intermediate.dense.bias"].numpy()
    offset = index["encoder.layer.0.intermediate.dense.bias"].offset
    assert store[offset : offset + bias.nbytes] == bias.tobytes()


_KILLED = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
from support import tiny_compile
from nestforge.compiler.compile import compile_bundle

def progress(*event):
    if event == ("build", 4, 10):
        os.kill(os.getpid(), signal.SIGKILL)

compile_bundle(sys.argv[2], output=sys.argv[3], progress=progress, **json.loads(sys.argv[4]))
"""


def test_a_killed_compile_goes_on_in_another_process_to_the_same_bytes(
    compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with other string hashes, one of them killed: still the bundle of one undisturbed compile."""
    output = tmp_path / "out"
    task = [str(Path(__file__).parents[1]), str(compiled.model), str(output), json.dumps(compiled.arguments)]
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, *task], env={**os.environ, "PYTHONHASHSEED": "4711"}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    assert len(list((tmp_path / "out.partial" / "output").glob("*.onnx"))) == 4
    monkeypatch.setattr(templates_module, "traced_template", _never("traced again"))
    monkeypatch.setattr(rank_axes, "taylor_scores", _never("ranked again"))
    compile_bundle(compiled.model, output=output, **compiled.arguments)
    assert contents(output) == contents(compiled.bundle)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(p.name for p in output.iterdir()) == sorted(p.name for p in compiled.bundle.iterdir())


class Interrupted:
    """A progress listener that stops the compile at its n-th report."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, *_: object) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the costly steps; every engine takes a made-up time on this host that follows from its name."""
    counts: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        real = getattr(module, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            result = real(*arguments, **named)
            counts[name] += 1  # what was interrupted was not done
            return result

        monkeypatch.setattr(module, name, counted)

    def measure(call: Any, **_: Any) -> list[float]:
        counts["measure"] += 1
        return [1 + len(call.func.__self__.engine.submodel) / 10]

    for module, name in (
        (templates_module, "traced_template"),
        (store_module, "write_tensors"),
        (build_engine, "emit"),
        (rank_axes, "taylor_scores"),
    ):
        count(module, name)
    monkeypatch.setattr(measuring, "times_of", measure)
    return counts


def test_interrupted_at_every_step_it_finishes_without_doing_anything_twice(
    model: Path, text: Path, tmp_path: Path, work: Counter[str]
) -> None:
    """On this host, so that rungs are measured and then removed; an interrupt may fall before and after that."""
    profile = replace(board(), host=_fingerprint(probe_host()))

    def attempt(output: Path, progress: Callable[..., None]) -> None:
        compile_bundle(model, profile, output, text=text, include="budgets", progress=progress)

    attempt(tmp_path / "undisturbed", lambda *_: None)
    undisturbed = work.copy()
    work.clear()
    output, interrupts = tmp_path / "out", 0
    while not output.exists():
        try:
            attempt(output, Interrupted(at=interrupts))
        except KeyboardInterrupt:
            assert not output.exists()
            interrupts += 1
    assert interrupts > 25
    assert work == undisturbed
    assert undisturbed["traced_template"] == 1
    assert contents(output) == contents(tmp_path / "undisturbed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "undisturbed"]
    assert verify_bundle(output, model)


def test_other_arguments_do_not_go_on_where_these_stopped(model: Path, tmp_path: Path, work: Counter[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        compile_bundle(model, board(), tmp_path / "out", include="budgets", progress=Interrupted(at=12))
    assert work["traced_template"] == 1
    other = board(buckets=["1x4"])
    with pytest.raises(KeyboardInterrupt):
        compile_bundle(model, other, tmp_path / "out", include="budgets", progress=Interrupted(at=12))
    assert work["traced_template"] == 2
    assert not list((tmp_path / "out.partial").glob("*b2-s8*"))


@pytest.fixture(scope="module")
def traced(model: Path) -> Template:
    return template_of(load_universal(open_source(model)))


@pytest.fixture
def traced_once(traced: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace of the model at the one bucket of ``board()`` is at hand: these tests are about what comes later."""
    monkeypatch.setattr(templates_module, "traced_template", lambda *_: traced)


@pytest.mark.usefixtures("traced_once", "blatant")
def test_a_wrong_graph_stops_everything(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build_engine.emit

    def damaged(*given: Any) -> bytes:
        model = onnx.ModelProto.FromString(real(*given))
        activation = next(node for node in model.graph.node if node.op_type == "Gelu")
        activation.op_type = "Relu"
        del activation.attribute[:]
        return model.SerializeToString()

    monkeypatch.setattr(build_engine, "emit", damaged)
    with pytest.raises(ParityError, match=r"first to diverge: encoder\.layer\.0\.intermediate\.intermediate_act_fn"):
        compile_bundle(model, board(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("traced_once")
def test_what_is_damaged_on_its_way_to_the_disk_is_not_published(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last look is at the written files, through the runtime."""
    real = compile.write_manifest

    def damaged(stage: Any, *arguments: Any) -> Any:
        manifest = real(stage, *arguments)
        path = next(stage.folder.glob("*.onnx"))
        path.write_bytes(path.read_bytes()[:-1] + b"\x00")
        return manifest

    monkeypatch.setattr(compile, "write_manifest", damaged)
    with pytest.raises(BundleCorruptError, match=r"\.onnx: sha256 "):
        compile_bundle(model, board(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_the_slicer_does_not_understand_is_traced_and_says_so(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def puzzled(*_: object) -> None:
        raise SliceError("node x (CumSum): no rule for CumSum on an elastic dimension")

    monkeypatch.setattr(make_template, "free_elastic_dims", puzzled)
    bundle = compile_bundle(model, board(), tmp_path / "out", include="budgets", submodels=["ffn8_24-heads1_2"])
    emitted = {engine.submodel: engine.emitted for engine in open_bundle(bundle).manifest.engines}
    assert emitted.pop("ffn32-heads2") == "sliced"
    assert set(emitted.values()) == {"traced"}
    assert "ffn8x1_24x1-heads1x1_2x1" in emitted
    assert verify_bundle(bundle, model)
    assert "traced" in (bundle / "report.md").read_text()


@pytest.mark.usefixtures("traced_once")
def test_include_says_what_is_built(model: Path, tmp_path: Path) -> None:
    ladder = compile_bundle(model, board(), tmp_path / "ladder", include="ladder")
    assert len(open_bundle(ladder).manifest.submodels) == 7
    few = compile_bundle(model, board(), tmp_path / "few", include="budgets")
    ids = {entry.id for entry in open_bundle(few).manifest.submodels}
    assert ids == {budget.submodel for budget in open_bundle(few).manifest.budgets}
    assert len(ids) == 2
    for engine in open_bundle(few).manifest.engines:
        assert (few / engine.file).read_bytes() == (ladder / engine.file).read_bytes()
        assert engine.bucket == BUCKET


def _never(message: str) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail(message)

    return refuse
