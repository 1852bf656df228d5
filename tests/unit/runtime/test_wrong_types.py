"""Public calls of a loaded model with values of other types: each is one line, none a raw error of Python."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.errors import InputError

GOLDEN = Path(__file__).parents[2] / "golden"
WRONG: tuple[Any, ...] = (5, -1, 1.5, True, b"x", [5], [None], {"a": 1}, {"x"}, object(), float("nan"), 10**30)


@pytest.mark.parametrize("name", ["path", "memory_mb", "residency", "threads", "affinity", "check", "provider"])
def test_load(name: str) -> None:
    for wrong in WRONG:
        if (name, wrong) in (("threads", True), ("memory_mb", 10**30)) or (name == "memory_mb" and wrong in (5, 1.5)):
            continue
        with pytest.raises(nestforge.NestforgeError):
            nestforge.load(**{"path": GOLDEN / "bundle-merged", name: wrong}).close()


def test_texts_and_tokens() -> None:
    with nestforge.load(GOLDEN / "bundle-fewer-heads") as model:
        calls: tuple[Callable[[Any], object], ...] = (
            model,
            model.token_counts,
            model.generate,
            model.generate.tokens,
            lambda wrong: model.generate("the", session=wrong),
        )
        for call in calls:
            for wrong in (5, True, {"a": 1}, {"x"}, object(), [None]):
                with pytest.raises(InputError):
                    call(wrong)
        for wrong in (1.5, "x", None, True):
            with pytest.raises(InputError, match="token: expected int"):
                model.generate.token_text(wrong)
        assert (model.generate.token_text(-1), model.generate.token_text(10**30)) == ("-1", f"{10**30}")


@pytest.mark.parametrize("name", ["budget", "submodel"])
def test_names_of_a_request_and_of_a_generation(name: str) -> None:
    with nestforge.load(GOLDEN / "bundle-fewer-heads") as model:
        feeds = {"input_ids": np.ones((1, 4), np.int64)}
        calls: tuple[Callable[..., object], ...] = (
            partial(model, feeds),
            partial(model, feeds, latency_ms=1e9),
            partial(model, feeds, deadline_ms=1e9),
            partial(model.choose, 1, 4),
            partial(model.generate, [5], max_tokens=1),
        )
        for call in calls:
            for wrong in (5, True, ["x"], {}, b"x"):
                with pytest.raises(InputError, match=rf"^{name}: expected str or None, got {type(wrong).__name__} "):
                    call(**{name: wrong})
