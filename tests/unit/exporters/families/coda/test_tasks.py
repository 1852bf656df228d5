"""A task may be offered at fewer reductions than its base, whatever the base states of the others."""

import json
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
from nestforge.bundle.device_files.task_index import read_tasks
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.add_task import add_task
from nestforge.errors import CheckpointError, SelectionError
from nestforge.exporters.checkpoints.checkpoint import open_checkpoint
from nestforge.exporters.checkpoints.own_folder import read_config
from nestforge.exporters.families.coda.config import CodaConfig
from nestforge.exporters.families.coda.encoder_decoder import load_model
from nestforge.exporters.families.coda.tasks import read_task, save_task
from safetensors.numpy import load_file, save_file
from support.tiny_coda import (
    TASK_SETTINGS,
    encoder_config,
    save_pair_task,
    save_tiny_coda,
    save_tiny_pair,
    save_tiny_task,
)
from support.tiny_compile import board
from support.tiny_models import edit_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base that is dense at r = 1 and states a k for r = 4, and a task on it."""
    folder = tmp_path_factory.mktemp("tasks")
    own = {"reductions": (4, 2, 1), "reduction": 2, "reduction_of_one": "dense", "tokens_selected": {"8": {"4": 1}}}
    save_tiny_coda(folder / "base", **TASK_SETTINGS, **own)
    save_tiny_task(folder / "base", folder / "task", 1)
    return folder


def read(folder: Path, tmp_path: Path, **changes: Any) -> dict[str, tuple[int, ...]]:
    stated = json.loads((folder / "task" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stated, **changes}))
    (tmp_path / "model.safetensors").write_bytes((folder / "task" / "model.safetensors").read_bytes())
    base = read_config(open_checkpoint(folder / "base"), CodaConfig)
    return dict(read_task(base, tmp_path).choices)


@pytest.mark.parametrize(
    ("reductions", "expected"), [([4, 2, 1], (4, 2, 1)), ([4, 2], (4, 2)), ([2, 1], (2, 1)), (None, (4, 2))]
)
def test_a_task_is_offered_at_some_of_the_base_s(
    folder: Path, tmp_path: Path, reductions: list[int] | None, expected: tuple[int, ...]
) -> None:
    assert read(folder, tmp_path, reductions=reductions) == {"coda.reduction": expected}


def test_reductions_without_that_of_training_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: reductions: \[4, 1\] lack 2, the reduction of training"):
        read(folder, tmp_path, reductions=[4, 1])


WHOLE, REDUCED = "ffn32-coda.reduction1", "ffn32-coda.reduction3"
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [6, 7], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]]
PROFILE = board(budgets={"full": {}}, buckets=["2x8"])


@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``; ``bundle`` with the task ``both``, and ``third``, of one reduction, added later."""
    root = tmp_path_factory.mktemp("coda-t5-tasks")
    base = save_tiny_pair(root / "base", encoder=encoder_config(reduction_of_one="routed"))
    save_pair_task(base, root / "both", 1, reductions=(3, 1))
    save_pair_task(base, root / "third", 2, epsilon=0.3, reduction=3, reductions=(3,))
    nestforge.compile(
        base, PROFILE, root / "bundle", tasks={"both": root / "both"}, generate=True, measure=False, mergeable=True
    )
    add_task(root / "bundle", "third", root / "third", base)
    return root


def written(checkpoint: Path, reduction: int, prompt: list[int], count: int) -> list[int]:
    """The module's greedy text, by passes over both texts."""
    model = load_model(checkpoint)
    model.encoder.reduction = reduction
    read, text = torch.tensor([prompt]), [0]
    for _ in range(count):
        text.append(int(model(read, torch.ones_like(read), torch.tensor([text]))[0, -1].argmax()))
    return text[1:]


@pytest.mark.parametrize("merge", [(), ("both", "third")])
def test_texts_are_those_of_each_task_s_module(pair_folder: Path, merge: tuple[str, ...]) -> None:
    found = {}
    with nestforge.load(pair_folder / "bundle", merge=merge) as model:
        for task, checkpoint, submodel, reduction in (
            (None, "base", REDUCED, 3),
            ("both", "both.trained", WHOLE, 1),
            ("both", "both.trained", REDUCED, 3),
            ("third", "third.trained", None, 3),
            (None, "base", REDUCED, 3),
        ):
            rows = model.generate(PROMPTS, task=task, submodel=submodel, max_tokens=6, stop=[]).rows
            for prompt, row in zip(PROMPTS, rows, strict=True):
                assert list(row.tokens) == written(pair_folder / checkpoint, reduction, prompt, len(row.tokens))
                assert ("is merged into its weights" in row.runs[0].reason) == (task in merge)
            found[task, reduction] = [row.tokens for row in rows]
    assert len({str(texts) for texts in found.values()}) == len(found), "texts that are the same would prove little"


def test_a_pair_of_texts_is_answered_as_the_module_does(pair_folder: Path) -> None:
    rng = np.random.default_rng(0)
    read, second = (rng.integers(3, 40, (2, 8)) for _ in range(2))
    feeds = {"input_ids": read, "attention_mask": np.ones_like(read), "decoder_input_ids": second}
    expected = load_model(pair_folder / "third.trained")(*map(torch.from_numpy, feeds.values()))
    with nestforge.load(pair_folder / "bundle") as model:
        answer = model(feeds, task="third")
    assert answer.submodel == REDUCED, "the only one that it is offered at"
    np.testing.assert_allclose(answer["logits"], expected.numpy(), atol=1e-4)


def test_a_reduction_that_a_task_is_not_offered_at_is_refused(pair_folder: Path) -> None:
    said = rf"^task third was proven on {REDUCED}; the request names {WHOLE}; ask for one"
    with nestforge.load(pair_folder / "bundle") as model:
        with pytest.raises(SelectionError, match=said):
            model.generate(PROMPTS[0], task="third", submodel=WHOLE)
        with pytest.raises(SelectionError, match=rf"task third .*; budget full names {WHOLE}; ask for one"):
            model.generate(PROMPTS[0], task="third", budget="full")
        runs = model.generate(PROMPTS[0], task="third", tokens_per_second=1e9, max_tokens=4, stop=[]).rows[0].runs
        assert {run.submodel for run in runs} == {REDUCED}


def test_every_engine_of_a_task_is_proven_and_verified(pair_folder: Path) -> None:
    """The engine that reads prompts with what it selected, too."""
    bundle = open_bundle(pair_folder / "bundle")
    for task in read_tasks(bundle):
        receipts = {receipt.engine: receipt.parity for receipt in task.parity}
        own = {engine.id for engine in bundle.manifest.listed_engines if engine.submodel in task.submodels}
        assert receipts.keys() == own
        (reader,) = [engine for engine in own if engine.startswith(f"{REDUCED}.encoder@")]
        assert [routes.made > 0 for routes in receipts[reader].routing or ()] == [True]
    report = nestforge.verify(bundle.path, pair_folder / "base")
    assert report
    assert sum("encoder" in verdict.engine and "task" in verdict.engine for verdict in report.engines) == 6


def test_a_task_of_another_model_is_refused(pair_folder: Path, tmp_path: Path) -> None:
    """A decoder that was trained as well, one of other settings, and an encoder's task alone."""
    base, trained = (
        pair_folder / "base",
        load_file(pair_folder / "both.trained" / "model.safetensors"),
    )
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((pair_folder / "both.trained" / "config.json").read_bytes())
    decoder = next(name for name in trained if name.startswith("decoder."))
    save_file({**trained, decoder: trained[decoder] + 1}, other / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {decoder} differs from that of .*, where tasks share it frozen"):
        save_task(other, base, tmp_path / "task")
    edit_config(other, scale_decoder_outputs=False)
    with pytest.raises(CheckpointError, match="scale_decoder_outputs: False, the base has True; all tasks share"):
        save_task(other, base, tmp_path / "task")
    assert not (tmp_path / "task").exists()
    tensors = load_file(pair_folder / "both" / "model.safetensors")
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((pair_folder / "both" / "config.json").read_bytes())
    save_file({name.removeprefix("encoder."): value for name, value in tensors.items()}, alone / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"encoder\.layers\.0"):
        add_task(pair_folder / "bundle", "alone", alone, base)
