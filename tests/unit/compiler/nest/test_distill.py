from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest
from nestforge.compiler.nest.distill import Effort, _drawn, distill, trainable
from nestforge.compiler.nest.texts import TextBatches, training_texts
from nestforge.compiler.planning.levels import levels
from nestforge.compiler.work.clock import Clock, silent
from nestforge.compiler.work.staging import Stage

from .conftest import Ordinary


def test_the_loss_falls(ordinary: Ordinary, tmp_path: Path) -> None:
    universal = ordinary.universal
    stage = Stage(tmp_path, tmp_path)
    texts = TextBatches.of(universal.source, training_texts(ordinary.text))
    ladder = levels(universal.spec, {"ffn": (0.25, 1.0)}, 1)
    teacher = copy.deepcopy(universal.module)
    taught = distill(universal, teacher, ladder, texts, Effort(0, steps=120), stage, Clock(silent))
    assert (taught.steps, len(taught.losses)) == (120, 120)
    small = [loss for step, loss in enumerate(taught.losses) if _drawn(2, 0, step) == 0]
    assert mean(small[-10:]) < 0.85 * mean(small[:10])
    assert not any(parameter.requires_grad for parameter in universal.module.parameters())


def test_all_but_embedding_tables_are_trained(ordinary: Ordinary) -> None:
    universal = ordinary.universal
    left = universal.parameters().keys() - trainable(universal).keys()
    assert left == {f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")}


def test_half_of_the_steps_run_the_whole_model_and_the_levels_share_the_rest() -> None:
    counts = Counter(_drawn(4, 0, step) for step in range(3000))
    assert counts[3] / 3000 == pytest.approx(1 / 2, abs=0.03)
    assert all(counts[level] / 3000 == pytest.approx(1 / 6, abs=0.03) for level in range(3))


@pytest.mark.parametrize(
    ("effort", "steps", "seconds", "done"),
    [
        (Effort(0, steps=10), 0, 99.0, 0.0),
        (Effort(0, steps=10), 5, 0.0, 0.5),
        (Effort(0, steps=10), 10, 0.0, 1.0),
        (Effort(0, seconds=60.0), 7, 45.0, 0.75),
    ],
)
def test_how_much_of_a_training_is_done(effort: Effort, steps: int, seconds: float, done: float) -> None:
    assert effort.done(steps, seconds) == done
