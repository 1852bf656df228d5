import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.strict import nearest, structure, unstructure


class Misfit(Exception):
    pass


@dataclass(frozen=True)
class Part:
    name: str = field(metadata={"choices": ("wheel", "axle")})
    size: float = field(default=1.0, metadata={"min": 0.5})


@dataclass(frozen=True)
class Machine:
    version: Literal[1, 2]
    count: int = field(metadata={"min": 1})
    parts: tuple[Part, ...] = ()
    limits: Mapping[str, float | str] = field(default_factory=dict)
    kind: Literal["cart", "engine"] | None = None
    sealed: bool = False
    extra: Any = None


MACHINE = {"version": 1, "count": 3}


def read(data: object) -> Machine:
    return structure(Machine, data, "here", Misfit)


machines = st.builds(
    Machine,
    version=st.sampled_from([1, 2]),
    count=st.integers(1, 2**62),
    parts=st.lists(
        st.builds(Part, name=st.sampled_from(["wheel", "axle"]), size=st.floats(0.5, allow_infinity=False))
    ).map(tuple),
    limits=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False) | st.text()),
    kind=st.sampled_from(["cart", "engine", None]),
    sealed=st.booleans(),
    extra=st.none() | st.integers(-100, 100),
)


@given(machines)
def test_what_is_written_is_read_back(machine: Machine) -> None:
    assert read(json.loads(json.dumps(unstructure(machine)))) == machine


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["cart", "wheel", 2**5000]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text() | st.integers() | st.sampled_from([*vars(read(MACHINE)), "name", "size"]), inner)
    ),
    max_leaves=8,
)


@given(anything | st.fixed_dictionaries({"version": anything, "count": anything}, optional={"parts": anything}))
def test_any_data_is_read_or_refused_in_one_short_line(data: object) -> None:
    try:
        machine = read(data)
    except Misfit as refusal:
        message = str(refusal)
    else:
        assert read(unstructure(machine)) == machine
        message = "here: read"
    assert message.startswith("here: ")
    assert len(message.splitlines()) == 1
    assert len(message) < 500


def test_defaults_that_are_none_are_left_out_and_others_are_not() -> None:
    assert unstructure(read(MACHINE)) == {"version": 1, "count": 3, "parts": [], "limits": {}, "sealed": False}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cuont": 3}, "here: unknown key 'cuont'; did you mean 'count'?"),
        ({7: 3}, "here: unknown key 7; expected one of count, extra, kind, limits, parts, sealed, version"),
        ({"count": "3"}, "here: count: expected a whole number, got str '3'"),
        ({"count": 3.0}, "here: count: expected a whole number, got float 3.0"),
        ({"count": True}, "here: count: expected a whole number, got bool True"),
        ({"count": None}, "here: count: expected a whole number, got nothing"),
        ({"count": 0}, "here: count: expected at least 1, got 0"),
        ({"count": [1]}, "here: count: expected a whole number, got a list"),
        ({"version": 3}, "here: version: got 3; expected one of 1, 2"),
        ({"version": True}, "here: version: got True; expected one of 1, 2"),
        ({"version": 1.0}, "here: version: got 1.0; expected one of 1, 2"),
        ({"version": "1"}, "here: version: got '1'; expected one of 1, 2"),
        ({"version": [1]}, "here: version: got [1]; expected one of 1, 2"),
        ({"kind": "crat"}, "here: kind: got 'crat'; did you mean 'cart'?"),
        ({"sealed": 1}, "here: sealed: expected true or false, got int 1"),
        ({"parts": "wheel"}, "here: parts: expected a list, got str 'wheel'"),
        ({"parts": [{"name": "wheel"}, 5]}, "here: parts[1]: expected a mapping, got int 5"),
        ({"parts": [{"size": 2}]}, "here: parts[0]: missing key 'name'"),
        ({"parts": [{"name": "wheels"}]}, "here: parts[0]: name: got 'wheels'; did you mean 'wheel'?"),
        ({"parts": [{"name": "axle", "size": 0.25}]}, "here: parts[0]: size: expected at least 0.5, got 0.25"),
        (
            {"parts": [{"name": "axle", "size": float("nan")}]},
            "here: parts[0]: size: expected a finite number, got nan",
        ),
        ({"limits": []}, "here: limits: expected a mapping with names as keys, got a list"),
        ({"limits": {1: 2.0}}, "here: limits: expected a mapping with names as keys, got a mapping"),
        ({"limits": {"a": None}}, "here: limits.a: expected a number, got nothing"),
        ({"limits": {"a\nb": None}}, r"here: limits.'a\nb': expected a number, got nothing"),
        ({"limits": {"a": float("inf")}}, "here: limits.a: expected a finite number, got inf"),
        ({"extra": float("nan")}, "here: extra: expected a finite number, got nan"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[Any, Any], message: str) -> None:
    with pytest.raises(Misfit) as refusal:
        read({**MACHINE, **change})
    assert str(refusal.value) == message


def test_a_missing_key_is_named() -> None:
    with pytest.raises(Misfit, match=r"^here: missing key 'count'$"):
        read({"version": 1})


@pytest.mark.parametrize("number", [10**400, -(10**400), 2**63, 16**5000], ids=lambda number: number.bit_length())
@pytest.mark.parametrize("where", ["count", "limits"])
def test_a_number_of_hundreds_of_digits_is_refused(number: int, where: str) -> None:
    """A float field would overflow, and printing one of thousands of digits fails in Python itself."""
    with pytest.raises(
        Misfit, match=rf"{where}.*: expected a number below 2\^63, got int of {number.bit_length()} bits$"
    ):
        read({**MACHINE, where: {"a": number} if where == "limits" else number})


def test_a_whole_number_may_stand_for_a_float_and_becomes_one() -> None:
    size = read({**MACHINE, "parts": [{"name": "axle", "size": 2}]}).parts[0].size
    assert (size, type(size)) == (2.0, float)


def test_a_long_value_is_cut() -> None:
    with pytest.raises(Misfit) as refusal:
        read({**MACHINE, "count": "x" * 10_000})
    assert len(str(refusal.value)) < 150


def test_an_error_of_ours_is_not_taken_for_a_misfit_of_one_alternative() -> None:
    """Alternatives of a union are tried in turn; only the error that stands for a misfit may move on to the next."""

    class Alarm(Misfit):
        pass

    def error(message: str) -> Exception:
        return Alarm(message)

    with pytest.raises(Alarm, match=r"limits\.a: expected a number, got a list"):
        structure(Machine, {**MACHINE, "limits": {"a": []}}, "here", error)


def test_nearest_lists_what_is_known() -> None:
    assert nearest("zzz", ["b", "a"]) == "; expected one of a, b"
    assert nearest("latency", ["latency_ms", "memory_mb"]) == "; did you mean 'latency_ms'?"
    assert nearest("x", []) == "; expected one of none"


def test_types_are_resolved_once_per_class(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Fresh:
        count: int

    asked: list[type] = []
    resolve = typing.get_type_hints
    monkeypatch.setattr(typing, "get_type_hints", lambda cls: asked.append(cls) or resolve(cls))
    assert [structure(Fresh, {"count": n}, "here", Misfit) for n in (1, 2)] == [Fresh(1), Fresh(2)]
    assert asked == [Fresh]


@dataclass(frozen=True)
class Free:
    host: Mapping[str, Any]


@pytest.mark.parametrize("value", [10**30, float("nan"), {"inner": [10**5000]}])
def test_free_values_can_be_printed_and_written_again(value: object) -> None:
    with pytest.raises(Misfit, match=r"doc: host\.a"):
        structure(Free, {"host": {"a": value}}, "doc", Misfit)
    assert structure(Free, {"host": {"a": [1, {"b": None}]}}, "doc", Misfit).host == {"a": [1, {"b": None}]}
