from __future__ import annotations

import os
from pathlib import Path

import pytest
from nestforge.bundle.files import FileIdentity
from nestforge.bundle.manifest import WEIGHTS_NAME
from nestforge.errors import BundleCorruptError
from nestforge.runtime.graphs.weight_store import MappedStore, mapped_store, tensor_spans


def test_engines_of_one_process_share_a_store(own_bundle: Path) -> None:
    first = mapped_store(own_bundle / WEIGHTS_NAME, None)
    assert mapped_store(own_bundle / WEIGHTS_NAME, None) is first


def test_a_store_that_is_being_closed_is_not_taken_over(own_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another thread, at the moment in which the last engine lets go of it."""
    close, next_one, armed = os.close, list[MappedStore](), False

    def closing(descriptor: int) -> None:
        nonlocal armed
        if armed:
            armed = False
            next_one.append(mapped_store(own_bundle / WEIGHTS_NAME, None))
        close(descriptor)

    monkeypatch.setattr(os, "close", closing)
    store = mapped_store(own_bundle / WEIGHTS_NAME, None)
    armed = True
    del store
    next_one[0].require_unchanged()


@pytest.mark.parametrize("more", [0, 1])
def test_a_header_larger_than_stores_have_is_refused_before_it_is_read(tmp_path: Path, more: int) -> None:
    store, length = tmp_path / WEIGHTS_NAME, 4 * 2**20 + more
    store.write_bytes(length.to_bytes(8, "little") + b"{}".ljust(length))
    identity = FileIdentity.of(store.stat())
    if more:
        with pytest.raises(BundleCorruptError, match=f"a header of {length} bytes, more than the {2**22} allowed$"):
            tensor_spans(store, identity)
    else:
        assert tensor_spans(store, identity) == ()
