from __future__ import annotations

import os

import pytest
from nestforge.exporters.checkpoints.offline_transformers import offline_transformers


def test_nothing_is_fetched_or_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    logging = transformers.utils.logging
    logging.set_verbosity_warning()
    logging.enable_progress_bar()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # given back as it was
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert offline_transformers() is transformers
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert logging.get_verbosity() == logging.ERROR
    assert not logging.is_progress_bar_enabled()


def test_a_user_may_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    offline_transformers()
    assert os.environ["HF_HUB_OFFLINE"] == "0"
