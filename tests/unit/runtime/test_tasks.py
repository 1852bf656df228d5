"""Tasks of an open bundle: bound to engines that are open already, from several threads, under a cap."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import nestforge
import numpy as np
import pytest
from nestforge.bundle.entries.task_entry import BASE
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import BundleCorruptError, BundleIncompatibleError, InputError, NestforgeError, SelectionError
from nestforge.runtime.engines.onnxruntime.runner import OnnxRuntimeRunner
from nestforge.runtime.graphs.task_tensors import base_tensors, read_task_tensors
from nestforge.runtime.tasks import bytes_of_tasks, merged_bytes

GOLDEN = Path(__file__).parents[2] / "golden" / "bundle-tasks"
MERGED = GOLDEN.with_name("bundle-merged")
TEXT = "the quick brown fox"
IDS = np.arange(12, dtype=np.int64).reshape(1, 12)
FEEDS = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
QUARTER = "ffn24-coda.reduction4"


def test_the_base_and_every_task_are_bound_to_the_same_engine_in_every_residency() -> None:
    found = {}
    for residency in ("shared", "packed", "mapped"):
        with nestforge.load(GOLDEN, residency=residency) as model:
            for task in (None, "both", "quarter", None):
                outputs = model(FEEDS, submodel=QUARTER, task=task)["logits"]
                np.testing.assert_allclose(outputs, found.setdefault(task, outputs), atol=1e-5)
    assert not np.allclose(found[None], found["both"], atol=1e-2)
    assert not np.allclose(found["quarter"], found["both"], atol=1e-2)


def test_answers_are_the_callers_own() -> None:
    """A binding is kept between runs, and what it returned is not written to again."""
    with nestforge.load(GOLDEN) as model:
        first = model(FEEDS, task="both")["logits"]
        before = first.copy()
        model({**FEEDS, "input_ids": IDS + 1}, task="both")
        np.testing.assert_array_equal(first, before)


def test_threads_that_ask_for_different_tasks_get_their_own() -> None:
    with nestforge.load(GOLDEN, threads=1) as model:
        expected = {task: model(FEEDS, submodel=QUARTER, task=task)["logits"] for task in (None, "both", "quarter")}

        def ask(task: str | None) -> None:
            for _ in range(50):
                found = model(FEEDS, submodel=QUARTER, task=task)["logits"]
                np.testing.assert_array_equal(found, expected[task])

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(ask, (*expected, *expected)))


def test_a_task_is_chosen_among_its_own_engines() -> None:
    with nestforge.load(GOLDEN) as model:
        assert model.choose(1, 12, task="quarter").engine.submodel == QUARTER
        assert model.choose(1, 12, task="both").engine.submodel == model.choose(1, 12).engine.submodel
        assert "task quarter" in repr(model(FEEDS, task="quarter"))
        with pytest.raises(InputError, match="task: expected a name, got 3"):
            model(FEEDS, task=3)
    with (
        nestforge.load(Path(GOLDEN).with_name("bundle-ranges")) as model,
        pytest.raises(SelectionError, match="no task"),
    ):
        model("a text", task="both")


def test_a_submodel_that_a_task_was_not_proven_on_is_named() -> None:
    with nestforge.load(GOLDEN) as model:
        largest, proven = model.bundle.manifest.largest_first[0].id, model.tasks.entries["quarter"].submodels
        budget = model.bundle.manifest.budgets[0]
        said = f"^task quarter was proven on {re.escape(', '.join(proven))}; "
        with pytest.raises(SelectionError, match=f"{said}the request names {re.escape(largest)}; ask for one"):
            model.choose(1, 12, task="quarter", submodel=largest)
        assert budget.submodel not in proven
        with pytest.raises(SelectionError, match=f"{said}budget {budget.name} names {re.escape(budget.submodel)}"):
            model(FEEDS, task="quarter", budget=budget.name)


def test_tasks_count_under_a_cap() -> None:
    bundle = open_bundle(GOLDEN)
    taken = 2 * 4260 / 1e6
    assert bytes_of_tasks(bundle, 1.0, 0) == 2 * 4260
    with pytest.raises(SelectionError, match="the bundle's tasks alone take"):
        nestforge.load(GOLDEN, memory_mb=taken / 2)
    with pytest.raises(SelectionError, match=r"^memory_mb=0\.009, 0\.0 MB of it the bundle's tasks: no engine fits"):
        nestforge.load(GOLDEN, memory_mb=0.009)
    plain = Path(GOLDEN).with_name("bundle-ranges")
    assert bytes_of_tasks(open_bundle(plain), 5, 0) == 0


def test_engines_share_the_base_s_own_tensors() -> None:
    bundle = open_bundle(GOLDEN)
    first = base_tensors(bundle)
    assert base_tensors(open_bundle(GOLDEN)) is first
    (task, _) = [read_task_tensors(bundle, entry) for entry in nestforge.load(GOLDEN).tasks.entries.values()]
    assert task.arrays.keys() == first.arrays.keys()


def test_an_engine_refuses_inputs_that_no_task_has() -> None:
    """Names, shapes and types are the manifest's, or the bundle is damaged."""
    bundle = open_bundle(GOLDEN)
    engine = bundle.manifest.engines[0]
    tasks = bundle.manifest.tasks
    fewer = replace(bundle, manifest=replace(bundle.manifest, tasks=replace(tasks, tensors=tasks.tensors[1:])))
    with (
        pytest.raises(BundleCorruptError, match=r"input classifier\.bias is tensor\(float\) \[3\], the manifest says"),
        OnnxRuntimeRunner(fewer, engine, "shared", 1),
    ):
        pass
    with (
        OnnxRuntimeRunner(bundle, engine, "shared", 1) as runner,
        pytest.raises(InputError, match="expected attention"),
    ):
        runner.run({"input_ids": IDS})


def test_a_base_whose_store_lacks_a_tensor_is_damaged(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(GOLDEN, tmp_path / "b"))
    store = copy / WEIGHTS_NAME
    store.write_bytes(store.read_bytes().replace(b"layers.0.adapter.down.bias", b"layers.0.adapter.down.bios", 1))
    with pytest.raises(BundleCorruptError, match=r"tensor layers\.0\.adapter\.down\.bias is missing"):
        base_tensors(open_bundle(copy))


def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestforge.runtime.load.provider_named", lambda name: name)
    with pytest.raises(InputError, match="provider 'cuda': the engines of a bundle with tasks run on the processor"):
        nestforge.load(GOLDEN, provider="cuda")


@pytest.mark.parametrize(
    ("bundle", "merge", "error", "said"),
    [
        ("bundle-merged", "a", InputError, "merge: expected a list of tasks by name, got 'a'"),
        ("bundle-merged", [1], InputError, r"merge: expected a list of tasks by name, got \[1\]"),
        ("bundle-merged", 5, InputError, "merge: expected a list of tasks by name, got 5"),
        ("bundle-merged", None, InputError, "merge: expected a list of tasks by name, got None"),
        ("bundle-merged", ["b"], SelectionError, "merge: no task 'b' in bundle"),
        ("bundle-ranges", ["a"], SelectionError, "merge: no task 'a' in bundle"),
        ("bundle-tasks", ["both"], BundleIncompatibleError, "can be merged into; compile it with `mergeable=True`"),
    ],
)
def test_what_cannot_be_merged_is_refused(bundle: str, merge: object, error: type[NestforgeError], said: str) -> None:
    with pytest.raises(error, match=said):
        nestforge.load(GOLDEN.with_name(bundle), merge=merge)


def test_engines_of_merged_tasks_count_under_a_cap() -> None:
    held = merged_bytes([open_bundle(MERGED).with_merged(BASE)])
    assert 1e-6 * held > 0.06, "two engines, packed"
    with pytest.raises(SelectionError, match=r"take 0\.\d MB, 0\.\d MB of it merged ones; merge fewer, or"):
        nestforge.load(MERGED, memory_mb=held / 1e6, merge=["a"])
    with nestforge.load(MERGED, memory_mb=2 * held / 1e6, merge=["a"]) as model:
        assert "merged" in model(TEXT, task="a").engine
        assert "merged" not in model(TEXT).engine


def test_they_are_packed_whatever_others_are_and_opened_with_them() -> None:
    with nestforge.load(MERGED, residency="shared", merge=["a"], preload=True) as model:
        assert all(pool.is_open(engine) for pool in model._merged.values() for engine in pool.bundle.manifest.engines)
        own, base = model(TEXT, task="a"), model(TEXT)
        assert (own.residency, base.residency) == ("packed", "shared")


def test_a_budget_is_judged_by_the_engines_that_answer() -> None:
    with nestforge.load(MERGED, merge=["a"]) as model:
        choice = model.choose(1, 16, task="a")
        assert "merged" in choice.engine.id
        (latency,) = [one for one in model.bundle.build.latencies if one.engine == choice.engine.id]
        assert choice.stated_ms == (latency.largest.measured_p50_ms or latency.largest.predicted_ms)
        assert choice.stated_ms != model.choose(1, 16).stated_ms
