"""Some hundred damaged inputs, always the same ones; ``make hostile`` tries as many as there is time for."""

from random import Random

from hostile.damage.protobuf_changes import damaged_protobuf, encoded, parsed
from hostile.drive import drive
from hostile.outcomes import described

COUNT = 240


def test_damaged_files_are_refused_or_answer_as_before() -> None:
    report = drive("damage", range(COUNT))
    assert report.total == COUNT
    assert not report.findings, f"\n{described(report.findings, 'damage')}"
    outcomes = {outcome for counts in report.counts.values() for outcome in counts}
    assert {"refused", "same", "answered", "found by full"} <= outcomes, "the damage reaches every depth"


def test_protobuf_damage_stays_a_message_and_goes_below_its_surface() -> None:
    inner = encoded([(1, 2, b"deep down"), (2, 0, 7)])
    raw = encoded([(1, 0, 300), (2, 2, inner), (3, 5, 1), (4, 1, 2)])
    assert parsed(raw) == [(1, 0, 300), (2, 2, inner), (3, 5, 1), (4, 1, 2)]
    assert encoded(parsed(raw)) == raw
    changes = [damaged_protobuf(raw, Random(seed)) for seed in range(100)]
    assert sum(bool(parsed(content)) for content, _ in changes) > 60
    assert any(how.startswith("/2/") for _, how in changes)
