"""What a chat template needs of the device; what it may do is in test_chat."""

from __future__ import annotations

import sys

import pytest
from nestforge.errors import InputError
from nestforge.runtime.generation import sandbox as module
from nestforge.runtime.generation.bounded_templates import allowance
from nestforge.runtime.generation.sandbox import sandbox


def test_without_jinja_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InputError) as caught:
        sandbox()
    assert str(caught.value) == (
        "chat template: needs Jinja2 (pip install 'nestforge[generate]'), which is not installed here; install it, or "
        "pass a prompt in place of a chat"
    )


@pytest.mark.parametrize(
    ("installed", "fits"), [("3.1.5", False), ("2.11", False), ("3.1.6", True), ("3.10.0rc1", True)]
)
def test_releases_with_an_open_sandbox_are_refused(monkeypatch: pytest.MonkeyPatch, installed: str, fits: bool) -> None:
    monkeypatch.setattr(module, "version", lambda name: installed)
    if fits:
        with allowance():
            assert sandbox().from_string("{{ 1 }}").render() == "1"
        return
    with pytest.raises(InputError) as caught:
        sandbox()
    assert str(caught.value) == (
        f"chat template: expected Jinja2 3.1.6 or later, got {installed}; pip install 'nestforge[generate]'"
    )
