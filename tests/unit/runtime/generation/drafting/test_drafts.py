"""What a draft proposes for a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.errors import InputError
from nestforge.runtime.generation.calls.row import Row, RowOptions
from nestforge.runtime.generation.calls.step_times import StepTimes
from nestforge.runtime.generation.drafting.drafts import NgramDraft, SubmodelDraft
from nestforge.runtime.generation.sampling import Sampling
from nestforge.runtime.generation.stops import Stops

ENGINE = EngineEntry("large", "large", Bucket(1, 1), "onnxruntime", "large.onnx", "sliced", 0, 0, 0, 0)
MANY = RowOptions(20, Sampling(), Stops(), frozenset())


def test_an_encoders_prompt_is_looked_up_too() -> None:
    prompt = np.array([9, 5, 6, 7, 8, 1])
    row = Row(0, np.array([0, 5, 6]), MANY, None, source=prompt)
    assert [drafted.token for drafted in NgramDraft().propose(row, 3)] == [7, 8, 1]
    assert NgramDraft().can_propose(row)
    assert not NgramDraft().can_propose(Row(0, np.array([0, 5, 6]), MANY, None))


class Overflowed:
    """A session whose drafts are not finite."""

    def draft(self, *_: Any) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return np.full(9, np.nan, np.float32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_overflow_of_a_draft_names_the_draft(temperature: float) -> None:
    row = Row(0, np.array([7, 8]), RowOptions(5, Sampling(temperature), Stops(), frozenset()), None)
    line = r"^draft large: row 0: expected finite logits, the largest is nan: the engine overflowed; generate with"
    with pytest.raises(InputError, match=line):
        SubmodelDraft(ENGINE, Overflowed(), StepTimes()).propose(row, 2)  # type: ignore[arg-type]
