"""Tasks merged into the weights of engines: PEFT's own answers and texts, a slice's, those of conditional adapters."""

import shutil
from pathlib import Path

import nestforge
import numpy as np
import onnx
import pytest
from nestforge.bundle.device_files.task_index import read_tasks
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.add_task import add_task
from nestforge.compiler.compile import compile_bundle
from nestforge.errors import InputError, ParityError, PlanError
from nestforge.runtime.graphs import task_tensors
from support.tiny_coda import TASK_SETTINGS, save_tiny_coda, save_tiny_task
from support.tiny_compile import board

PEFT = Path(__file__).parents[2] / "golden" / "peft"
BERT, LLAMA = PEFT / "bert", PEFT / "llama"
HALVES = {"ffn": (0.5, 1.0), "heads": (0.5, 1.0)}
PROFILE = board(budgets={"full": {}}, buckets=["2x8"])
WHOLE = {"temperature": 0.0, "max_tokens": 6}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``b`` compiled, ``a`` added later."""
    path = tmp_path_factory.mktemp("merged") / "bundle"
    tasks = {"b": BERT / "b"}
    compile_bundle(BERT / "base", PROFILE, path, tasks=tasks, levels=HALVES, lora_rank=4, mergeable=True)
    store = (path / WEIGHTS_NAME).read_bytes()
    add_task(path, "a", BERT / "a", BERT / "base")
    assert (path / WEIGHTS_NAME).read_bytes() == store, "what is merged is not kept in the bundle"
    return path


def test_peft_s_own_answers_and_those_of_slices(bundle: Path) -> None:
    expected = np.load(BERT / "expected.npz")
    ids = expected["ids"]
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    with nestforge.load(bundle, merge=["a", "b"]) as merged, nestforge.load(bundle, merge=["a"]) as model:
        base = model(feeds)
        assert "merged" not in base.engine
        for task in ("a", "b"):
            answer = merged(feeds, task=task)
            np.testing.assert_allclose(answer["last_hidden_state"], expected[task], atol=5e-5)
            assert (answer.task, answer.engine, answer.residency) == (task, "ffn32-heads2.merged@b2-s8", "packed")
            assert answer.reason.endswith(f"task {task} is merged into its weights")
        as_inputs, small = (one(feeds, task="b", submodel="50%") for one in (model, merged))
        assert (as_inputs.engine, small.engine) == ("ffn16-heads1@b2-s8", "ffn16-heads1.merged@b2-s8")
        np.testing.assert_allclose(small["last_hidden_state"], as_inputs["last_hidden_state"], atol=2e-5)
        np.testing.assert_array_equal(merged(feeds)["last_hidden_state"], base["last_hidden_state"])


def test_engines_that_a_task_is_merged_into_have_no_pairs_and_cost_less(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    for own, taking in zip(manifest.tasks.merged, manifest.engines, strict=True):
        graph = onnx.load(bundle / own.file, load_external_data=False).graph
        assert [tensor.name for tensor in graph.input] == [spec.name for spec in manifest.inputs]
        assert not any("lora" in tensor.name for tensor in graph.initializer)
        assert (own.submodel, own.bucket) == (taking.submodel, taking.bucket)
        assert own.flops < taking.flops
        assert own.parity is not None
    timed = {latency.engine for latency in open_bundle(bundle).build.latencies}
    assert timed == {engine.id for engine in manifest.timed_engines}


def test_each_task_is_proven_and_verified(bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened = open_bundle(bundle)
    for task in read_tasks(opened):
        assert {receipt.engine for receipt in task.parity} == {one.id for one in opened.manifest.listed_engines}
    report = nestforge.verify(bundle, BERT / "base")
    assert report
    own = "ffn32-heads2.merged@b2-s8"
    assert {verdict.engine for verdict in report.engines} >= {own, f"{own}, task a", f"{own}, task b"}
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    right = task_tensors._change
    monkeypatch.setattr(task_tensors, "_change", lambda *of: None if (found := right(*of)) is None else 1.01 * found)
    with pytest.raises(ParityError, match=r"task c, engine ffn16-heads1\.merged@b2-s8: output last_hidden_state"):
        add_task(copy, "c", BERT / "a", BERT / "base")
    assert [task.name for task in read_tasks(open_bundle(copy))] == ["a", "b"]


def test_texts_are_those_of_peft(tmp_path: Path) -> None:
    levels, tasks = {"ffn": (1.0,)}, {"a": LLAMA / "a"}
    path = compile_bundle(
        LLAMA / "base", PROFILE, tmp_path / "b", tasks=tasks, generate=True, levels=levels, mergeable=True
    )
    expected = np.load(LLAMA / "expected.npz")
    prompt, text = expected["ids"][0].tolist(), expected["text_a"][0].tolist()
    with nestforge.load(path, merge=["a"]) as model:
        found = model.generate(prompt, task="a", **WHOLE)
        assert (found.task, list(found.rows[0].tokens)) == ("a", text)
        assert found.rows[0].runs[0].reason.endswith("task a is merged into its weights")
        base = model.generate(prompt, **WHOLE).rows[0]
        assert "merged" not in base.runs[0].reason
        assert list(base.tokens) != text
        with model.session(task="a") as session:
            for turn in (prompt, [*prompt, *text[:3]]):
                row = model.generate(turn, session=session, task="a", **WHOLE).rows[0]
            assert row.reused_tokens > len(prompt)
            with pytest.raises(
                InputError, match=r"^session: its keys are those of task a, the request is for the base"
            ):
                model.generate(prompt, session=session, **WHOLE)
        with (
            model.session() as session,
            pytest.raises(InputError, match=r"^session: its keys are those of the base, the request is for task a"),
        ):
            model.generate(prompt, session=session, task="a", **WHOLE)
    verdicts = nestforge.verify(path, LLAMA / "base").engines
    assert "ffn32.merged.cached@b1_64-s1_40, task a" in [verdict.engine for verdict in verdicts]


def test_a_task_of_conditional_adapters_is_merged_too(tmp_path: Path) -> None:
    """Its tensors take the place of the base's: nothing is summed."""
    base = save_tiny_coda(tmp_path / "base", **TASK_SETTINGS)
    save_tiny_task(base, tmp_path / "quarter", 2, epsilon=0.3, reduction=4, reductions=None)
    path = compile_bundle(base, PROFILE, tmp_path / "b", tasks={"quarter": tmp_path / "quarter"}, mergeable=True)
    ids = np.arange(16, dtype=np.int64).reshape(2, 8)
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    with nestforge.load(path, merge=["quarter"]) as merged, nestforge.load(path) as model:
        own, other = merged(feeds, task="quarter"), model(feeds, task="quarter")
        assert (own.engine, other.engine) == ("ffn24-coda.reduction4.merged@b2-s8", "ffn24-coda.reduction4@b2-s8")
        np.testing.assert_allclose(own["logits"], other["logits"], atol=2e-5)
        assert not np.allclose(own["logits"], model(feeds, submodel=own.submodel)["logits"], atol=1e-2)


def test_engines_to_merge_into_need_tasks(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="mergeable: expected tasks, which are merged into"):
        compile_bundle(BERT / "base", PROFILE, tmp_path / "b", mergeable=True)
