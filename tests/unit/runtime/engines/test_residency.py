from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.errors import SelectionError
from nestforge.runtime.engines.residency import EngineNeed, Residency, assign_residencies

MB = 10**6


def need(name: str, width: int, megabytes: int, latency: float) -> EngineNeed:
    return EngineNeed(name, (width,), megabytes * MB, 0, latency)


CHAIN = [need("s", 1, 10, latency=2), need("m", 2, 20, latency=3), need("l", 4, 40, latency=4)]


def test_without_a_cap_every_engine_is_packed() -> None:
    assert assign_residencies(CHAIN, None) == {"s": "packed", "m": "packed", "l": "packed"}


@pytest.mark.parametrize("residency", ["shared", "packed", "mapped"])
def test_a_request_wins_without_a_cap(residency: Residency) -> None:
    assert set(assign_residencies(CHAIN, None, residency).values()) == {residency}


@pytest.mark.parametrize(
    ("memory_mb", "expected"),
    [
        (10, {"s": "packed"}),  # a copy of its own costs one engine no more than the pages it would map
        (20, {"m": "shared", "s": "shared"}),
        (30, {"m": "packed", "s": "packed"}),
        (40, {"l": "shared", "m": "shared", "s": "shared"}),
        (50, {"l": "shared", "m": "shared", "s": "packed"}),
        (69, {"l": "shared", "m": "shared", "s": "packed"}),
        (70, {"l": "packed", "m": "packed", "s": "packed"}),
    ],
)
def test_the_store_counts_once_and_the_rest_is_packed_by_time_per_byte(
    memory_mb: float, expected: dict[str, Residency]
) -> None:
    assert assign_residencies(CHAIN, memory_mb) == expected


def test_engines_that_cannot_share_count_each_for_itself() -> None:
    """As on a GPU, where every plan has weights of its own."""
    plans = [replace(each, can_share=False) for each in CHAIN]
    assert assign_residencies(plans, None, "shared") == {"s": "packed", "m": "packed", "l": "packed"}
    assert assign_residencies(plans, 69) == {"m": "packed", "l": "packed"}
    assert assign_residencies(plans, 70) == {"s": "packed", "m": "packed", "l": "packed"}
    assert assign_residencies([*plans[:2], CHAIN[2]], 70) == {"s": "packed", "m": "packed", "l": "packed"}


@pytest.mark.parametrize("cap", ["8", True, 0, -1, float("nan"), [8]])
def test_a_cap_that_is_no_positive_number_is_refused(cap: object) -> None:
    with pytest.raises(SelectionError, match="memory_mb: expected a positive number, got "):
        assign_residencies(CHAIN, cap)


def test_a_request_that_does_not_fit_is_refused_with_the_figures() -> None:
    with pytest.raises(SelectionError, match=r"memory_mb=69: 3 engines as packed take 70.0 MB; raise the cap"):
        assign_residencies(CHAIN, 69, "packed")
    with pytest.raises(SelectionError, match=r"memory_mb=9: no engine fits; the smallest, s, takes 10.0 MB"):
        assign_residencies(CHAIN, 9)


def bytes_of(needs: list[EngineNeed], assigned: dict[str, Residency]) -> int:
    """The rule, plainly: shared engines that read a part of what another shared one reads add no pages."""
    shared = {(need.weight_bytes, need.widths, need.layers) for need in needs if assigned.get(need.engine) == "shared"}

    def order(row: tuple[int, tuple[int, ...], tuple[int, int]]) -> tuple[Any, ...]:
        return -row[0], [-width for width in row[1]], row[2]

    def contains(outer: tuple[Any, ...], inner: tuple[Any, ...]) -> bool:
        wide = all(mine <= other for mine, other in zip(inner[1], outer[1], strict=True))
        return order(outer) < order(inner) and wide and outer[2][0] <= inner[2][0] and inner[2][1] <= outer[2][1]

    pages = sum(row[0] for row in shared if not any(contains(other, row) for other in shared))
    opened = [need for need in needs if need.engine in assigned]
    copies = sum(need.weight_bytes for need in opened if assigned[need.engine] != "shared")
    return pages + copies + sum(need.own_bytes for need in opened)


def by_the_rule(needs: list[EngineNeed], cap_bytes: float) -> dict[str, Residency]:
    """``auto``, every engine tried against the sum of all."""
    assigned: dict[str, Residency] = {}
    for need in sorted(needs, key=lambda n: (-n.importance, -n.weight_bytes, n.own_bytes, n.engine)):
        least: Residency = "shared" if need.can_share else "packed"
        if bytes_of(needs, {**assigned, need.engine: least}) <= cap_bytes:
            assigned[need.engine] = least
    for need in sorted(needs, key=lambda n: (-n.latency_ms * n.importance / max(1, n.weight_bytes), n.engine)):
        packed: dict[str, Residency] = {**assigned, need.engine: "packed"}
        if need.engine in assigned and bytes_of(needs, packed) <= cap_bytes:
            assigned = packed
    return assigned


@st.composite
def random_needs(draw: st.DrawFn) -> list[EngineNeed]:
    small = st.integers(0, 3)
    needs = []
    for number in range(draw(st.integers(1, 12))):
        widths = (draw(small), draw(small))
        first, last = sorted((draw(small), draw(small)))
        weight_bytes = draw(st.sampled_from([(1 + widths[0] + widths[1]) * (1 + last - first), 4])) * MB
        latency, importance = draw(st.sampled_from([1.0, 2.0])), draw(st.sampled_from([1.0, 2.0]))
        can_share = draw(st.sampled_from([True, True, True, False]))
        own = draw(small) * MB
        needs.append(EngineNeed(f"e{number}", widths, weight_bytes, own, latency, importance, (first, last), can_share))
    return needs


@given(needs=random_needs(), cap=st.integers(1, 150))
def test_what_is_open_is_counted_as_by_the_rule(needs: list[EngineNeed], cap: int) -> None:
    expected = by_the_rule(needs, cap * MB)
    if expected:
        assert assign_residencies(needs, cap) == assign_residencies(needs[::-1], cap) == expected
    else:
        with pytest.raises(SelectionError, match="no engine fits"):
            assign_residencies(needs, cap)


@given(needs=random_needs(), residency=st.sampled_from(["shared", "packed", "mapped"]))
def test_what_is_asked_for_takes_what_the_rule_says(needs: list[EngineNeed], residency: Residency) -> None:
    assigned = assign_residencies(needs, None, residency)
    takes = bytes_of(needs, assigned)
    if takes:
        assert assign_residencies(needs, takes / MB, residency) == assigned
        with pytest.raises(SelectionError, match=f"as {residency} take {takes / MB:.1f} MB"):
            assign_residencies(needs, (takes - 1) / MB, residency)


def test_a_group_is_admitted_together_or_not_at_all() -> None:
    """Alone the large half of each pair would leave no room for the other."""
    pairs = [
        EngineNeed(f"{name}.{part}", (width,), weight * MB, MB, 1.0, layers=layers, group=name)
        for name, width, weight in (("large", 2, 20), ("small", 1, 10))
        for part, layers in (("read", (1, 2)), ("write", (0, 1)))
    ]
    assert assign_residencies(pairs, 41) == {"small.read": "packed", "small.write": "packed"}
    assert assign_residencies(pairs, 42) == dict.fromkeys(("large.read", "large.write"), "packed")
    assert assign_residencies(pairs, 44).keys() == {need.engine for need in pairs}
    line = r"^memory_mb=21: no engine fits; the smallest, small\.read with small\.write, takes 22\.0 MB; raise the cap$"
    with pytest.raises(SelectionError, match=line):
        assign_residencies(pairs, 21)
    with pytest.raises(
        SelectionError, match=r"^memory_mb=30, 5 MB left: no engine fits; the smallest, small\.read with"
    ):
        assign_residencies(pairs, 5, limit="memory_mb=30, 5 MB left")
