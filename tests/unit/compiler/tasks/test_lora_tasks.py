"""Adapters that PEFT wrote, against what PEFT itself answered with them (tests/golden/peft), whole and sliced."""

from __future__ import annotations

import shutil
from pathlib import Path

import nestforge
import numpy as np
import pytest
from nestforge.bundle.manifest import WEIGHTS_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.add_task import add_task
from nestforge.compiler.compile import compile_bundle
from nestforge.errors import CheckpointError, PlanError
from nestforge.exporters.adapter_folder import read_adapter
from nestforge.exporters.source import open_source
from nestforge.exporters.tasks import ranks_of, with_low_rank
from support.tiny_compile import board

PEFT = Path(__file__).parents[3] / "golden" / "peft"
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
    assert bundle.manifest.tasks is not None
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
    assert narrow is not None
    with pytest.raises(
        CheckpointError, match=r"rank 4 beside .*query: the engines have 2; compile again with `lora_rank=4`"
    ):
        narrow.read(BERT / "a")
    with pytest.raises(CheckpointError, match=r"target .*: the engines have no pair there; compile again"):
        narrow.read(BERT / "b")
    with pytest.raises(CheckpointError, match=r"no adapter of PEFT, as .* is; tasks of one bundle are of one kind"):
        compile_bundle(BERT / "base", PROFILE, tmp_path / "b", tasks={"a": BERT / "a", "x": BERT / "base"})
    with pytest.raises(PlanError, match="`lora_rank=4`: expected at least 1, with tasks"):
        compile_bundle(BERT / "base", PROFILE, tmp_path / "b", lora_rank=4)
