"""Folders of ordinary encoders, converted and compiled, and tasks of conditional adapters: one set of engines, each
task by its own tensors."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import onnx
import pytest
import torch
from nestforge.bundle.device_files.task_index import read_tasks
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.manifest import TASKS_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler import add_task as module
from nestforge.compiler.add_task import add_task
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.convert_coda import convert_coda
from nestforge.compiler.engines import build_engine
from nestforge.errors import (
    BundleCorruptError,
    BundleIncompatibleError,
    CheckpointError,
    InputError,
    NestforgeError,
    OutputError,
    ParityError,
    PlanError,
    SelectionError,
)
from nestforge.exporters.families.coda.model import load_model
from nestforge.exporters.families.coda.tasks import save_task
from nestforge.profiles.nest_request import ConversionSettings
from nestforge.runtime.graphs.task_tensors import TaskTensors
from support.tiny_coda import TASK_SETTINGS, save_tiny_coda, save_tiny_task
from support.tiny_compile import board
from support.tiny_models import save_tiny_encoder, save_tiny_vit

SETTINGS = ConversionSettings(adapter_size=4, reduction=2, reductions=(2, 1))


def bert_inputs() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(4, 64, (2, 8))
    mask = np.ones((2, 8), np.int64)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}


def vit_inputs() -> dict[str, np.ndarray]:
    return {"pixel_values": np.random.default_rng(0).standard_normal((2, 2, 8, 8)).astype(np.float32)}


@pytest.mark.parametrize(("kind", "bucket", "tokens"), [("bert", "2x8", 8), ("vit", "2x1", 5)])
def test_a_converted_folder_compiles_at_every_reduction(tmp_path: Path, kind: str, bucket: str, tokens: int) -> None:
    import torch
    import transformers

    save = save_tiny_encoder if kind == "bert" else save_tiny_vit
    feeds = bert_inputs() if kind == "bert" else vit_inputs()
    folder = save(tmp_path / "m", num_hidden_layers=1)
    report = convert_coda(folder, tmp_path / "conditional", SETTINGS)
    assert (report.left_out, report.groups["routers"]) == (("pooler",), report.config.hidden_size)
    assert (tmp_path / "conditional" / "tokenizer.json").is_file() == (kind == "bert")

    profile = board(budgets={"full": {}}, buckets=[bucket])
    bundle = open_bundle(compile_bundle(tmp_path / "conditional", profile, tmp_path / "b"))
    found = {int((engine.metadata or {})["reduction"]): engine for engine in bundle.manifest.engines}
    for reduction, selected in ((2, -(-tokens // 2)), (1, tokens)):
        engine = found[reduction]
        assert (engine.emitted, engine.slice_problem) == ("sliced", None)
        assert engine.parity is not None
        metadata = engine.metadata or {}
        assert (metadata["tokens per row"], metadata["tokens selected"]) == (tokens, selected)
    reference = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = reference(**{name: torch.from_numpy(array) for name, array in feeds.items()}).last_hidden_state
    with nestforge.load(bundle.path) as model:
        answer = model(feeds, submodel=found[1].submodel).outputs["last_hidden_state"]
        routed = model(feeds, submodel=found[2].submodel, routing=True)
    # Padding has no answer, but a class of transformers has one.
    valid = feeds["attention_mask"] > 0 if kind == "bert" else np.ones((2, tokens), bool)
    np.testing.assert_allclose(answer[valid], states.numpy()[valid], rtol=0, atol=1e-4)
    assert routed.routing["routes.0"].shape == (2, -(-tokens // 2))


def test_nothing_is_written_where_it_fails_or_the_output_exists(tmp_path: Path) -> None:
    folder = save_tiny_encoder(tmp_path / "m", num_hidden_layers=1)
    with pytest.raises(NestforgeError, match=r"^dense layers: expected numbers from 0 to 0, got 1$"):
        convert_coda(folder, tmp_path / "out", ConversionSettings(dense_layers=(1,)))
    with pytest.raises(CheckpointError, match="no such folder"):
        convert_coda(tmp_path / "none", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="exists already"):
        convert_coda(folder, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_the_model_that_is_converted_is_never_replaced(tmp_path: Path) -> None:
    folder = save_tiny_encoder(tmp_path / "m", num_hidden_layers=1)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(OutputError, match="is the model that is converted, which is not replaced"):
        convert_coda(folder, folder / ".." / "m", SETTINGS, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


PROFILE = board(budgets={"full": {}}, buckets=["2x8"], variants={"coda.dispatch": "gather", "coda.combine": "scatter"})
WHOLE, QUARTER = "ffn24-coda.reduction1", "ffn24-coda.reduction4"
IDS = np.arange(16, dtype=np.int64).reshape(2, 8)
FEEDS = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``; tasks ``both`` at both reductions, ``quarter`` at one; ``bundle`` with ``both``, compiled."""
    root = tmp_path_factory.mktemp("tasks")
    base = save_tiny_coda(root / "base", **TASK_SETTINGS)
    save_tiny_task(base, root / "both", 1)
    save_tiny_task(base, root / "quarter", 2, epsilon=0.3, reduction=4, reductions=None)
    compile_bundle(base, PROFILE, root / "bundle", tasks={"both": root / "both"})
    return root


@pytest.fixture
def bundle(folder: Path, tmp_path: Path) -> Path:
    """A copy to add to."""
    return Path(shutil.copytree(folder / "bundle", tmp_path / "bundle"))


def expected(checkpoint: Path, reduction: int) -> np.ndarray:
    model = load_model(checkpoint).double()
    model.reduction = reduction
    return model(*map(torch.from_numpy, FEEDS.values())).numpy()


def test_one_engine_answers_as_each_task_and_as_the_base(folder: Path) -> None:
    with nestforge.load(folder / "bundle") as model:
        for task, checkpoint in ((None, "base"), ("both", "both.trained"), (None, "base")):
            for submodel, reduction in ((WHOLE, 1), (QUARTER, 4)):
                answer = model(FEEDS, submodel=submodel, task=task)
                assert (answer.task, answer.submodel) == (task, submodel)
                np.testing.assert_allclose(answer["logits"], expected(folder / checkpoint, reduction), atol=2e-5)


def test_what_a_bundle_states_of_its_task(folder: Path) -> None:
    bundle = open_bundle(folder / "bundle")
    (task,) = read_tasks(bundle)
    assert (task.name, task.submodels, task.facts) == ("both", (WHOLE, QUARTER), {"reduction": 1, "epsilon": "0.5"})
    assert [entry.path for entry in task.source] == ["config.json", "model.safetensors"]
    receipts = {receipt.engine: receipt.parity for receipt in task.parity}
    assert receipts.keys() == {engine.id for engine in bundle.manifest.engines}
    for parity in receipts.values():
        assert "with the task's tensors" in parity.reference
        assert parity.weights_sha256 == bundle.sha256(WEIGHTS_NAME)
        assert all(routes.worst_score_gap <= parity.atol for routes in parity.routing or ())
    names = [tensor.name for tensor in bundle.manifest.tasks.tensors]
    assert "layers.1.router.temperatures" in names
    assert "layers.0.adapter.down.weight" in names
    assert "layers.0.router.weight" not in names, "a dense layer has none"
    assert "layers.0.attention.query.weight" not in names


def test_a_task_more_leaves_everything_else_as_it_is(folder: Path, bundle: Path) -> None:
    """The second task has another schedule and answers at one reduction alone."""
    before = {path.name: path.read_bytes() for path in bundle.iterdir() if path.name != TASKS_NAME}
    add_task(bundle, "quarter", folder / "quarter", folder / "base")
    after = {path.name: path.read_bytes() for path in bundle.iterdir()}
    assert before.items() <= after.items()
    (new,) = after.keys() - before.keys() - {TASKS_NAME}
    assert new.startswith("task.quarter.")
    assert len(after[new]) < 1.05 * sum(tensor.numel() * 4 for tensor in task_tensors(folder)) + 4096
    with nestforge.load(bundle) as model:
        assert model(FEEDS, task="both").submodel == WHOLE
        answer = model(FEEDS, task="quarter")
        assert answer.submodel == QUARTER
        np.testing.assert_allclose(answer["logits"], expected(folder / "quarter.trained", 4), atol=2e-5)
        with pytest.raises(SelectionError, match=r"task quarter was proven on ffn24-coda.reduction4; the request"):
            model(FEEDS, task="quarter", submodel=WHOLE)
    report = nestforge.verify(bundle, folder / "base")
    assert report
    assert report.tasks == 2
    assert [verdict.engine for verdict in report.engines if "task" in verdict.engine] == [
        f"{WHOLE}@b2-s8, task both",
        f"{QUARTER}@b2-s8, task both",
        f"{QUARTER}@b2-s8, task quarter",
    ]


def task_tensors(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(folder / "quarter" / "model.safetensors").values())


def test_a_task_that_fails_its_gate_is_not_added(folder: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines run with one tensor of another task: the written file would not be what was proven."""
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}

    def wrong(name: str, data: bytes, entry: object) -> TaskTensors:
        right = actual(name, data, entry)
        return TaskTensors(name, {**right.arrays, "norm.weight": right.arrays["norm.weight"] + 0.01})

    actual = module.task_tensors
    monkeypatch.setattr(module, "task_tensors", wrong)
    with pytest.raises(ParityError, match=r"task quarter, engine ffn24-coda.reduction4@b2-s8: .*allowed"):
        add_task(bundle, "quarter", folder / "quarter", folder / "base")
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before


def test_a_wrong_engine_is_named_by_its_first_module(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graph runs with the base's tensors, which are inputs."""

    def damaged(*given: Any) -> bytes:
        model = onnx.ModelProto.FromString(emit(*given))
        next(node for node in model.graph.node if node.op_type == "Relu").op_type = "Tanh"
        return model.SerializeToString()

    emit = build_engine.emit
    monkeypatch.setattr(build_engine, "emit", damaged)
    with pytest.raises(ParityError, match=r"first to diverge: layers\.0\.adapter"):
        compile_bundle(folder / "base", PROFILE, tmp_path / "b", tasks={"both": folder / "both"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "folder_name", "error", "said"),
    [
        ("Both", "quarter", InputError, "task Both: there is another of this name"),
        ("a/b", "quarter", InputError, "expected a name of at most 64"),
        ("new", "base", CheckpointError, "model_type 'coda_encoder', expected 'coda_task'"),
        ("new", "other", CheckpointError, "made for a base whose frozen weights have the hash"),
        ("new", "wide", CheckpointError, r"layers.1.router.weight has shape \[17\]; expected \[16\]"),
        ("new", "rounds", CheckpointError, "soft_top_k: rounds: 5, the base has 3; all tasks share its graph"),
        ("new", "reductions", CheckpointError, "reduction 2: the base is offered at 4, 1"),
    ],
)
def test_bad_tasks_are_refused_in_one_line(
    folder: Path, bundle: Path, tmp_path: Path, name: str, folder_name: str, error: type[NestforgeError], said: str
) -> None:
    task = folder / folder_name
    if not task.exists():
        task = Path(shutil.copytree(folder / "quarter", tmp_path / "task"))
        config = json.loads((task / "config.json").read_text())
        changes = {
            "other": {"base_sha256": "0" * 64},
            "rounds": {"soft_top_k": {**config["soft_top_k"], "rounds": 5}},
            "reductions": {"reductions": [4, 2]},
        }
        (task / "config.json").write_text(json.dumps({**config, **changes.get(folder_name, {})}))
        if folder_name == "wide":
            widen_router(task / "model.safetensors")
    before = sorted(path.name for path in bundle.iterdir())
    with pytest.raises(error, match=said):
        add_task(bundle, name, task, folder / "base")
    assert sorted(path.name for path in bundle.iterdir()) == before


def test_a_checkpoint_that_trained_frozen_weights_too_is_no_task(folder: Path, tmp_path: Path) -> None:
    other = save_tiny_coda(tmp_path / "other", **TASK_SETTINGS, seed=1)
    with pytest.raises(CheckpointError, match=r"tensor embeddings\.word\.weight differs from that of .*base"):
        save_task(other, folder / "base", tmp_path / "task")
    narrow = save_tiny_coda(tmp_path / "narrow", **TASK_SETTINGS, adapter_size=4)
    with pytest.raises(CheckpointError, match="adapter_size: 8, the base has 4; all tasks share its graph"):
        save_task(folder / "both.trained", narrow, tmp_path / "task")
    (tmp_path / "task").mkdir()
    with pytest.raises(CheckpointError, match="task: exists already"):
        save_task(folder / "both.trained", folder / "base", tmp_path / "task")


def widen_router(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({**load_file(file), "layers.1.router.weight": torch.zeros(17)}, file)


def test_another_base_and_a_bundle_without_tasks_are_refused(folder: Path, bundle: Path, tmp_path: Path) -> None:
    other = save_tiny_coda(tmp_path / "other", **TASK_SETTINGS, seed=1)
    with pytest.raises(CheckpointError, match="its frozen weights have the hash"):
        add_task(bundle, "new", folder / "quarter", other)
    plain = compile_bundle(folder / "base", PROFILE, tmp_path / "plain", levels={"coda.reduction": (1.0,)})
    with pytest.raises(BundleIncompatibleError, match="its engines take no tasks; compile it with `tasks`"):
        add_task(plain, "new", folder / "quarter", folder / "base")
    with pytest.raises(PlanError, match="engines with tasks are in fp32, requested int8"):
        compile_bundle(
            folder / "base", replace(PROFILE, precisions=("int8",)), tmp_path / "b", tasks={"a": folder / "both"}
        )


def test_a_damaged_task_is_found_before_it_answers(bundle: Path) -> None:
    (file,) = bundle.glob("task.both.*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with nestforge.load(bundle) as model:
        model(FEEDS)  # the base needs no file of a task
        with pytest.raises(BundleCorruptError, match=r"task\.both\..*: sha256"):
            model(FEEDS, task="both")
        with pytest.raises(SelectionError, match=r"no task 'bot' .*did you mean 'both'"):
            model(FEEDS, task="bot")
    listed = bundle / TASKS_NAME
    listed.write_bytes(listed.read_bytes().replace(b'"both"', b'"bots"'))
    with pytest.raises(BundleCorruptError, match=r"tasks\.json: its seal is not that of its content"):
        nestforge.load(bundle)
