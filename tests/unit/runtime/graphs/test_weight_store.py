from __future__ import annotations

import os
from pathlib import Path

import pytest
from nestforge.runtime.bundle.manifest import WEIGHTS_NAME
from nestforge.runtime.graphs.weight_store import MappedStore, mapped_store


def test_engines_of_one_process_share_a_store(own_bundle: Path) -> None:
    first = mapped_store(own_bundle / WEIGHTS_NAME)
    assert mapped_store(own_bundle / WEIGHTS_NAME) is first


def test_a_store_that_is_being_closed_is_not_taken_over(own_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another thread, at the moment in which the last engine lets go of it."""
    close, next_one, armed = os.close, list[MappedStore](), False

    def closing(descriptor: int) -> None:
        nonlocal armed
        if armed:
            armed = False
            next_one.append(mapped_store(own_bundle / WEIGHTS_NAME))
        close(descriptor)

    monkeypatch.setattr(os, "close", closing)
    store = mapped_store(own_bundle / WEIGHTS_NAME)
    armed = True
    del store
    next_one[0].require_unchanged()
