"""Some hundred damaged inputs, always the same ones; ``make hostile`` tries as many as there is time for."""

import json
from random import Random

from hostile.damage.changes import damaged_bytes, damaged_framed_json, damaged_json, damaged_lines
from hostile.damage.protobuf_changes import damaged_protobuf, encoded, parsed
from hostile.drive import drive
from hostile.outcomes import described
from hostile.worker import GOLDEN

COUNT = 240


def test_damaged_files_are_refused_or_answer_as_before() -> None:
    report = drive("damage", range(COUNT))
    assert report.total == COUNT
    assert not report.findings, f"\n{described(report.findings, 'damage')}"
    outcomes = {outcome for counts in report.counts.values() for outcome in counts}
    assert {"refused", "same", "answered", "found by full"} <= outcomes, "the damage reaches every depth"


def test_damage_is_the_same_for_the_same_seed_and_differs_between_seeds() -> None:
    raw = json.dumps({"a": [1, 2.5, "x", None], "b": {"c": True}}).encode()
    for change in (damaged_bytes, damaged_json, damaged_lines):
        made = [change(raw, Random(seed)) for seed in range(50)]
        assert made == [change(raw, Random(seed)) for seed in range(50)]
        assert len({content for content, _ in made}) > 20


def test_json_damage_still_parses_often_enough_to_reach_what_reads_it() -> None:
    raw = json.dumps({"a": [1, 2.5, "x", None], "b": {"c": True}}).encode()
    parsing = 0
    for seed in range(200):
        try:
            json.loads(damaged_json(raw, Random(seed))[0])
            parsing += 1
        except (ValueError, RecursionError):
            pass
    assert parsing > 100


def test_protobuf_damage_stays_a_message_and_goes_below_its_surface() -> None:
    inner = encoded([(1, 2, b"deep down"), (2, 0, 7)])
    raw = encoded([(1, 0, 300), (2, 2, inner), (3, 5, 1), (4, 1, 2)])
    assert parsed(raw) == [(1, 0, 300), (2, 2, inner), (3, 5, 1), (4, 1, 2)]
    assert encoded(parsed(raw)) == raw
    changes = [damaged_protobuf(raw, Random(seed)) for seed in range(100)]
    assert sum(bool(parsed(content)) for content, _ in changes) > 60
    assert any(how.startswith("/2/") for _, how in changes)


def test_framed_damage_keeps_the_frame_often_enough() -> None:
    raw = (GOLDEN / "peft" / "bert" / "base" / "model.safetensors").read_bytes()
    framed = 0
    for seed in range(60):
        content, _ = damaged_framed_json(raw, Random(seed))
        size = int.from_bytes(content[:8], "little")
        framed += 8 + size <= len(content)
    assert framed > 30
