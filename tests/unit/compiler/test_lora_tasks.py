"""Adapters that PEFT wrote, against what PEFT itself answered with them (tests/golden/peft), whole and sliced; the
layout of a task's tensors."""

import shutil
from pathlib import Path

import nestforge
import numpy as np
import pytest
import torch
from nestforge.bundle.device_files.task_index import read_tasks
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.add_task import add_task, with_task
from nestforge.compiler.compile import compile_bundle
from nestforge.errors import CheckpointError, InputError, PlanError, SelectionError
from nestforge.exporters.adapter_folder import read_adapter
from nestforge.exporters.architecture import Task, hash_of
from nestforge.exporters.source import open_source
from nestforge.exporters.tasks import ranks_of, with_low_rank, with_tasks
from nestforge.exporters.universal import UniversalModel, load_universal
from support.tiny_coda import TASK_SETTINGS, save_tiny_coda, save_tiny_task
from support.tiny_compile import board, save_tiniest

PEFT = Path(__file__).parents[2] / "golden" / "peft"
BERT = PEFT / "bert"
PROFILE = board(budgets={"full": {}}, buckets=["2x8"])
HALVES = {"ffn": (0.5, 1.0), "heads": (0.5, 1.0)}
EXPECTED = np.load(BERT / "expected.npz")
FEEDS = {
    "input_ids": EXPECTED["ids"],
    "attention_mask": np.ones_like(EXPECTED["ids"]),
    "token_type_ids": np.zeros_like(EXPECTED["ids"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bundle`` with the larger adapter of two, and room for more ranks beside its targets."""
    root = tmp_path_factory.mktemp("lora")
    compile_bundle(BERT / "base", PROFILE, root / "bundle", tasks={"b": BERT / "b"}, levels=HALVES, lora_rank=4)
    return root


def test_peft_s_own_answers(folder: Path, tmp_path: Path) -> None:
    """The second adapter is added later; of the base, whose pairs are empty, nothing changes."""
    bundle = Path(shutil.copytree(folder / "bundle", tmp_path / "bundle"))
    with nestforge.load(bundle) as model:
        base = model(FEEDS)["last_hidden_state"]
    store = (bundle / WEIGHTS_NAME).read_bytes()
    add_task(bundle, "a", BERT / "a", BERT / "base")
    assert (bundle / WEIGHTS_NAME).read_bytes() == store
    with nestforge.load(bundle) as model:
        for task in ("b", "a", "b"):
            np.testing.assert_allclose(model(FEEDS, task=task)["last_hidden_state"], EXPECTED[task], atol=5e-5)
        np.testing.assert_array_equal(model(FEEDS)["last_hidden_state"], base)
        facts = {name: task.facts for name, task in model.tasks.entries.items()}
        sizes = {name: task.bytes for name, task in model.tasks.entries.items()}
    assert facts == {
        "a": {"rank": 4, "targets": "query, value"},
        "b": {"rank": 6, "targets": "dense, key, query, value", "filled with zeros": "rank 3 to 4"},
    }
    assert sizes["a"] == sizes["b"], "every task has all pairs, empty ones of zeros"
    report = nestforge.verify(bundle, BERT / "base")
    assert report
    assert {verdict.engine for verdict in report.engines} >= {
        "ffn16-heads1@b2-s8, task a",
        "ffn32-heads2@b2-s8, task b",
    }


def test_a_slice_cuts_its_pairs(folder: Path) -> None:
    """Rows of B where the layer's outputs are cut, columns of A where its inputs are; in the bundle's order."""
    bundle = open_bundle(folder / "bundle")
    found = {tensor.name: (tensor.shape, tensor.axis, tensor.unit) for tensor in bundle.manifest.tasks.tensors}
    at = "encoder.layer.0."
    assert found[f"{at}intermediate.dense.lora_B.weight"] == ((32, 6), "layers.0.ffn", 1)
    assert found[f"{at}intermediate.dense.lora_A.weight"] == ((6, 16), None, 1)
    assert found[f"{at}output.dense.lora_A.weight.T"] == ((32, 4), "layers.0.ffn", 1)
    assert found[f"{at}attention.self.query.lora_B.weight"] == ((16, 4), "layers.0.heads", 8)
    with nestforge.load(bundle.path) as model:
        small, whole = (model(FEEDS, task="b", submodel=name)["last_hidden_state"] for name in ("50%", "100%"))
        assert not np.allclose(small, whole, atol=1e-2)


def test_a_classifier_that_was_trained_whole(tmp_path: Path) -> None:
    folder = PEFT / "classifier"
    bundle = compile_bundle(folder / "base", PROFILE, tmp_path / "b", tasks={"a": folder / "a"}, levels={"ffn": (1.0,)})
    expected = np.load(folder / "expected.npz")
    with nestforge.load(bundle) as model:
        answer = model({**FEEDS, "input_ids": expected["ids"]}, task="a")
        np.testing.assert_allclose(answer["logits"], expected["a"], atol=5e-5)
        assert model.tasks.entries["a"].facts["whole"] == "classifier"


def test_adapters_that_engines_have_no_room_for_are_refused(tmp_path: Path) -> None:
    shapes = open_source(BERT / "base").architecture.parameter_shapes
    small, large = (read_adapter(BERT / name, shapes) for name in ("a", "b"))
    at = "encoder.layer.0.attention.self."
    assert ranks_of([small], 7)[f"{at}query"] == 7
    assert ranks_of([small, large], None)[f"{at}query"] == 4
    narrow = with_low_rank(open_source(BERT / "base"), {f"{at}query": 2, f"{at}value": 4}, ()).tasks
    with pytest.raises(
        CheckpointError, match=r"rank 4 beside .*query: the engines have 2; compile again with `lora_rank=4`"
    ):
        narrow.read(BERT / "a")
    with pytest.raises(CheckpointError, match=r"target .*: the engines have no pair there; compile again"):
        narrow.read(BERT / "b")
    with pytest.raises(CheckpointError, match=r"no adapter of PEFT, as .* is; tasks of one bundle are of one kind"):
        compile_bundle(BERT / "base", PROFILE, tmp_path / "b", tasks={"a": BERT / "a", "x": BERT / "base"})
    with pytest.raises(PlanError, match="`lora_rank=4`: expected tasks that are adapters"):
        compile_bundle(BERT / "base", PROFILE, tmp_path / "b", lora_rank=4)


LLAMA = PEFT / "llama"
LLAMA_EXPECTED = np.load(LLAMA / "expected.npz")
PROMPT = LLAMA_EXPECTED["ids"][0].tolist()
WHOLE = {"temperature": 0.0, "max_tokens": 6}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every linear layer of ``a`` has a pair; of ``b``, added later, queries and values alone."""
    path = tmp_path_factory.mktemp("llama") / "bundle"
    profile = board(budgets={"full": {}}, buckets=["2x8"])
    compile_bundle(LLAMA / "base", profile, path, tasks={"a": LLAMA / "a"}, generate=True, levels={"ffn": (1.0,)})
    return add_task(path, "b", LLAMA / "b", LLAMA / "base")


def test_logits_and_texts_are_those_of_peft(bundle: Path) -> None:
    with nestforge.load(bundle) as model:
        base = model.generate(PROMPT, **WHOLE)
        for task in ("a", "b"):
            logits = model({"input_ids": LLAMA_EXPECTED["ids"]}, task=task)["logits"]
            np.testing.assert_allclose(logits, LLAMA_EXPECTED[task], atol=5e-5)
            found = model.generate(PROMPT, task=task, **WHOLE)
            assert (found.task, list(found.rows[0].tokens)) == (task, LLAMA_EXPECTED[f"text_{task}"][0].tolist())
            assert found.rows[0].tokens != base.rows[0].tokens
        assert model.generate(PROMPT, **WHOLE).rows[0].tokens == base.rows[0].tokens


def test_a_session_keeps_the_keys_of_one_task(bundle: Path) -> None:
    with nestforge.load(bundle) as model, model.session(task="a") as session:
        text = LLAMA_EXPECTED["text_a"][0].tolist()
        for turn in (PROMPT, [*PROMPT, *text[:3]]):
            row = model.generate(turn, session=session, task="a", **WHOLE).rows[0]
            assert [*turn, *row.tokens][: len(PROMPT) + 6] == [*PROMPT, *text]
        assert row.reused_tokens > len(PROMPT)
        for task, named in ((None, "the base"), ("b", "task b")):
            with pytest.raises(InputError, match=f"session: its keys are those of task a, the request is for {named}"):
                model.generate(PROMPT, session=session, task=task, **WHOLE)
        with pytest.raises(SelectionError, match="no task 'c'"):
            model.generate(PROMPT, task="c", **WHOLE)
        with pytest.raises(InputError, match="task: expected str or None, got int 1"):
            model.generate(PROMPT, task=1, **WHOLE)


def test_a_cap_is_quoted_as_it_was_stated(bundle: Path) -> None:
    """Memory of tasks is counted beside sessions, under the cap that the caller gave."""
    taken = sum(task.bytes for task in read_tasks(open_bundle(bundle))) / 1e6
    with nestforge.load(bundle, memory_mb=0.4) as model:
        assert model.generate._engines._memory.left_mb == pytest.approx(0.4 - taken)
        with pytest.raises(SelectionError, match=r"^memory_mb=0\.4, .* MB left beside"):
            model.session(64, 40, "a")


def test_every_engine_has_a_receipt_of_every_task(bundle: Path) -> None:
    opened = open_bundle(bundle)
    for task in read_tasks(opened):
        assert {receipt.engine for receipt in task.parity} == {engine.id for engine in opened.manifest.every_engine}
    report = nestforge.verify(bundle, LLAMA / "base")
    assert report
    assert [verdict.engine for verdict in report.engines if "cached" in verdict.engine] == [
        f"ffn32.cached@b1_64-s1_40{task}" for task in ("", ", task a", ", task b")
    ]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[UniversalModel, Task]:
    folder = tmp_path_factory.mktemp("layout")
    base = save_tiny_coda(folder / "base", **TASK_SETTINGS)
    save_tiny_task(base, folder / "task", 1, epsilon=0.25)
    source, tasks = with_tasks(open_source(base), {"one": folder / "task"})
    return load_universal(source), tasks["one"]


def test_a_hash_follows_names_shapes_and_numbers() -> None:
    one, two = np.arange(4, dtype=np.float32), np.arange(4, dtype=np.float32).reshape(2, 2)
    assert len({hash_of({"a": one}), hash_of({"b": one}), hash_of({"a": two}), hash_of({"a": one + 1})}) == 4
    assert hash_of({"a": one, "b": two}) == hash_of({"b": two, "a": one})


def test_the_frozen_weights_are_what_the_task_says(opened: tuple[UniversalModel, Task]) -> None:
    universal, task = opened
    assert universal.frozen_sha256() == task.base_sha256


def test_a_task_brings_its_own_tensors_and_leaves_the_rest(opened: tuple[UniversalModel, Task]) -> None:
    """Parameters and the constants of the schedule; frozen weights are the same memory."""
    universal, task = opened
    of_task = with_task(universal, task, {}, task.base_sha256 or "")
    for name, parameter in of_task.parameters().items():
        if name in task.tensors:
            np.testing.assert_array_equal(parameter.numpy(), task.tensors[name])
            assert not torch.equal(parameter, universal.parameters()[name])
        else:
            assert parameter.data_ptr() == universal.parameters()[name].data_ptr()
    (temperatures,) = of_task.task_constants().values()
    assert temperatures.tolist()[-1] == 0.25
    (kept,) = universal.task_constants().values()
    assert kept.tolist()[-1] == 0.5


def test_another_base_is_refused(opened: tuple[UniversalModel, Task]) -> None:
    universal, task = opened
    with pytest.raises(CheckpointError, match="made for a base whose frozen weights have the hash"):
        with_task(universal, task, {}, "0" * 64)


def test_a_model_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="family bert has tasks as adapters of PEFT alone"):
        with_tasks(open_source(save_tiniest(tmp_path)), {"one": tmp_path})
