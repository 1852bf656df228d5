"""What a compile with tasks is asked for: refused before any work where no engine could be so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from nestforge.compiler.tasks.asked_tasks import asked_tasks
from nestforge.errors import PlanError
from nestforge.exporters.source import open_source
from nestforge.profiles.load_profile import load_profile
from support.tiny_compile import board

BERT = Path(__file__).parents[3] / "golden" / "peft" / "bert"
PROFILE = board(budgets={"full": {}}, buckets=["2x8"])
TASKS = {"a": BERT / "a"}


def test_a_source_that_takes_tasks_and_one_that_is_asked_for_none() -> None:
    source = open_source(BERT / "base")
    assert asked_tasks(source, PROFILE, {}, None, mergeable=False) == (source, {})
    taking, read = asked_tasks(source, PROFILE, TASKS, 8, mergeable=True)
    assert taking.tasks is not None
    assert read["a"].facts["filled with zeros"] == "rank 4 to 8"


def test_options_and_engines_that_cannot_be_are_refused() -> None:
    source = open_source(BERT / "base")
    with pytest.raises(PlanError, match="`lora_rank=0`: expected at least 1, with tasks"):
        asked_tasks(source, PROFILE, TASKS, 0, mergeable=False)
    with pytest.raises(PlanError, match="mergeable: expected tasks, which are merged into"):
        asked_tasks(source, PROFILE, {}, None, mergeable=True)
    with pytest.raises(PlanError, match="task: engines with tasks are in fp32, asked for fp32, int8"):
        asked_tasks(source, replace(PROFILE, precisions=("fp32", "int8")), TASKS, None, mergeable=False)
    with pytest.raises(PlanError, match="task: engines with tasks are for onnxruntime, profile jetson"):
        asked_tasks(source, load_profile("jetson-orin-nano-8gb"), TASKS, None, mergeable=False)
