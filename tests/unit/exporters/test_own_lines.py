"""Which line of which file is named where something happened to a model."""

from __future__ import annotations

from traceback import FrameSummary

import pytest
from nestforge import exporters
from nestforge.exporters.own_lines import line_of, own_line


def frame(file: str, line: int = 3, code: str = "x = y") -> FrameSummary:
    return FrameSummary(file, line, "forward", line=code)


def test_the_last_line_of_the_users_own_code() -> None:
    packages = "/env/lib/python3.11/site-packages"
    torch, ours = frame(f"{packages}/torch/nn/modules/linear.py"), frame(exporters.__file__)
    model = frame(f"{packages}/transformers/models/bert/modeling_bert.py", 7, "")
    helper = frame(f"{packages}/transformers/integrations/sdpa_attention.py")
    assert own_line([ours, frame("/users/net.py"), frame("/users/parts.py", 5), torch]) == " at parts.py:5 (x = y)"
    assert own_line([ours, model, helper, torch]) == " at modeling_bert.py:7"
    assert own_line([frame("/users/net.py"), model]) == " at net.py:3 (x = y)"
    assert own_line([helper]) == " at sdpa_attention.py:3 (x = y)"
    assert own_line([ours, torch, frame("<frozen importlib>")]) == ""


def test_of_an_error() -> None:
    with pytest.raises(ValueError, match="mine") as caught:
        raise ValueError("mine")
    assert line_of(caught.value).startswith(" at test_own_lines.py:")
