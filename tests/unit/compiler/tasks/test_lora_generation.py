"""Adapters that PEFT wrote for a decoder: texts as PEFT itself writes them, with a cache."""

from __future__ import annotations

from pathlib import Path

import nestforge
import numpy as np
import pytest
from nestforge.bundle.device_files.task_index import read_tasks
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.add_task import add_task
from nestforge.compiler.compile import compile_bundle
from nestforge.errors import InputError, SelectionError
from support.tiny_compile import board

LLAMA = Path(__file__).parents[3] / "golden" / "peft" / "llama"
EXPECTED = np.load(LLAMA / "expected.npz")
PROMPT = EXPECTED["ids"][0].tolist()
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
            logits = model({"input_ids": EXPECTED["ids"]}, task=task)["logits"]
            np.testing.assert_allclose(logits, EXPECTED[task], atol=5e-5)
            found = model.generate(PROMPT, task=task, **WHOLE)
            assert (found.task, list(found.rows[0].tokens)) == (task, EXPECTED[f"text_{task}"][0].tolist())
            assert found.rows[0].tokens != base.rows[0].tokens
        assert model.generate(PROMPT, **WHOLE).rows[0].tokens == base.rows[0].tokens


def test_a_session_keeps_the_keys_of_one_task(bundle: Path) -> None:
    with nestforge.load(bundle) as model, model.session(task="a") as session:
        text = EXPECTED["text_a"][0].tolist()
        for turn in (PROMPT, [*PROMPT, *text[:3]]):
            row = model.generate(turn, session=session, task="a", **WHOLE).rows[0]
            assert [*turn, *row.tokens][: len(PROMPT) + 6] == [*PROMPT, *text]
        assert row.reused_tokens > len(PROMPT)
        for task, named in ((None, "the base"), ("b", "task b")):
            with pytest.raises(InputError, match=f"session: its keys are those of task a, asked for {named}"):
                model.generate(PROMPT, session=session, task=task, **WHOLE)
        with pytest.raises(SelectionError, match="no task 'c'"):
            model.generate(PROMPT, task="c", **WHOLE)
        with pytest.raises(InputError, match="task: expected a name, got 1"):
            model.generate(PROMPT, task=1, **WHOLE)


def test_a_cap_is_quoted_as_it_was_stated(bundle: Path) -> None:
    """What tasks take is counted beside sessions, under the cap that the caller gave."""
    taken = sum(task.bytes for task in read_tasks(open_bundle(bundle))) / 1e6
    with nestforge.load(bundle, memory_mb=0.4) as model:
        assert model.generate._engines._memory is not None
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
