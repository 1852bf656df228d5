from __future__ import annotations

from nestforge.bundle.entries.engine_entry import ParityOutput, ParityRouting
from nestforge.compiler.parity.engine_verdict import EngineVerdict
from nestforge.runtime.summary.short_names import ShortNames
from nestforge.tools.commands.compiling.verify import _row

NAMES = ShortNames({"ffn8": "S"})
OUTPUTS = (ParityOutput("a", 1e-6, 2e-5, 0.9999999, 1e-7, 0.0, 0.0), ParityOutput("b", 3e-6, 1e-5, 1.0, 1e-7, 0.0, 0.0))
DECISIONS = (ParityRouting("routes.1", 40, 1, 2e-7, {}), ParityRouting("routes.2", 40, 2, 0.0, {}))


def test_a_row_has_the_worst_of_everything() -> None:
    assert _row(EngineVerdict("ffn8@b1-s8", OUTPUTS, None, DECISIONS), NAMES) == [
        "S@b1-s8",
        "equal",
        "3.0e-06",
        "2.0e-05",
        "0.9999999",
        "80",
        "3",
        "2.0e-07",
    ]


def test_a_row_has_dashes_for_what_there_is_not() -> None:
    assert _row(EngineVerdict("e", OUTPUTS), NAMES)[5:] == ["-", "-", "-"]
    broken = EngineVerdict("e", (), "decision routes.1: expected 0..31, got 132")
    assert _row(broken, NAMES) == ["e", "differs", *["-"] * 6]
