from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.compiler.parity.cases import Case
from nestforge.compiler.parity.compare import Rounding, tolerance_for
from nestforge.compiler.parity.judge import BrokenRoute, JudgedOutputs, Replayed, Verdict, judge

SPEC = TensorSpec("y", "float32", ("batch", "sequence", 4))
MASK = np.array([[1, 1, 0]], np.int64)
EXPECTED = np.random.default_rng(0).standard_normal((1, 3, 4))
LIMIT = tolerance_for("fp32", 2)
REFERENCE = Replayed([{"y": EXPECTED}], [{}])


def verdict(found: np.ndarray, reference: Replayed = REFERENCE) -> Verdict:
    cases = [Case("one", {"mask": MASK})]
    outputs = JudgedOutputs([SPEC], mask="mask")
    return judge(reference, [{"y": found.astype(np.float32)}], cases, outputs, LIMIT)


@pytest.mark.parametrize(("name", "is_judged"), [("encoder_last_hidden_state", False), ("logits", True)])
def test_a_mask_is_of_what_an_encoder_reads_where_there_is_a_decoder(name: str, is_judged: bool) -> None:
    """LongT5 adds -1e10 to scores, beside which float32 has none: what is masked alone is other numbers in float64."""
    outputs = JudgedOutputs([replace(SPEC, name=name)], mask="mask", has_decoder=True)
    reference = Replayed([{name: EXPECTED}], [{}])
    found = [{name: off_at(2).astype(np.float32)}]
    assert (judge(reference, found, [Case("one", {"mask": MASK})], outputs, LIMIT).broken is not None) == is_judged


def off_at(position: int) -> np.ndarray:
    found = EXPECTED.copy()
    found[0, position] += 0.1
    return found


def test_equal_outputs_break_nothing() -> None:
    found = verdict(EXPECTED)
    assert found.broken is None
    assert found.outputs[0].max_abs < 1e-6


def test_positions_that_the_mask_leaves_out_are_not_judged() -> None:
    assert verdict(off_at(2)).broken is None
    assert verdict(off_at(1)).broken is not None


def test_rounding_at_positions_that_the_mask_leaves_out_widens_nothing() -> None:
    """PyTorch's float32 may be anywhere where a position sees no key."""
    behind = np.array([[0.0, 0.0, 5.0]])
    rounded = replace(REFERENCE, roundings=[{"y": Rounding(behind, behind)}])
    assert verdict(EXPECTED, rounded).broken is None
    assert verdict(off_at(1), rounded).broken is not None


def test_a_broken_route_comes_first() -> None:
    decision = BrokenRoute("one", "routes, case one: worse")
    found = verdict(off_at(0), reference=replace(REFERENCE, broken=decision))
    assert found.broken is decision


def test_more_passes_of_float32_are_asked_before_a_failure_is_believed() -> None:
    """In them PyTorch itself is off by as much as the engine, and by less than would make it unprovable."""
    rounding = {"y": Rounding(max_abs=0.01, rms=0.005)}
    again = replace(REFERENCE, roundings=[rounding])
    near = EXPECTED + 0.004
    assert verdict(near).broken is not None
    assert verdict(near, reference=replace(REFERENCE, again=lambda _: again)).broken is None


def test_one_case_that_no_pass_explains_is_enough_and_else_all_that_break_the_rule_are_passed_again() -> None:
    asked: list[set[str]] = []
    cases = [Case(name, {"mask": MASK}) for name in ("one", "two", "three")]
    explained = {"y": Rounding(max_abs=0.01, rms=0.005)}

    def reference(explains: Collection[str], left: int = 3) -> Replayed:
        def again(only: Collection[str]) -> Replayed:
            asked.append(set(only))
            own = [explained if case.name in explains and case.name in only else {} for case in cases]
            return replace(reference(explains, left - 1), roundings=own)

        return Replayed([{"y": EXPECTED}] * 3, [{}] * 3, again=again if left else None)

    found = [{"y": array.astype(np.float32)} for array in (EXPECTED + 0.004, EXPECTED, EXPECTED + 0.004)]
    outputs = JudgedOutputs([SPEC], mask="mask")
    assert judge(reference(()), found, cases, outputs, LIMIT).broken is not None
    assert asked == [{"one"}] * 3
    asked.clear()
    assert judge(reference(("one", "three")), found, cases, outputs, LIMIT).broken is None
    assert asked == [{"one"}, {"one", "three"}]
    asked.clear()
    assert judge(reference(("one",)), found, cases, outputs, LIMIT).broken is not None
    assert asked[:2] == [{"one"}, {"one", "three"}]


def test_no_pass_is_made_for_what_no_rounding_that_proves_something_explains() -> None:
    """An eighth of every number; and an angle that only an unprovable rounding would allow."""

    def again(_: Collection[str]) -> Replayed:
        raise AssertionError("a pass was made")

    hopeless = replace(REFERENCE, again=again)
    assert verdict(EXPECTED * 1.125, hopeless).broken is not None
    assert verdict(EXPECTED[:, ::-1], hopeless).broken is not None


def test_what_is_within_half_of_the_limits_of_pytorchs_float32_needs_no_float64() -> None:
    """The rms limit is the narrowest here; what is beyond half of it is judged by float64 as any other case."""
    asked: list[set[str]] = []

    def exact(only: Collection[str]) -> Replayed:
        asked.append(set(only))
        return REFERENCE

    looked = replace(REFERENCE, in_float32=frozenset({"one"}), exact=exact)
    limit = LIMIT.rms * np.sqrt(12 / 8)  # of twelve numbers that are together at least 1, in the eight that count
    assert np.sqrt(np.sum(np.square(EXPECTED[0, :2])) / 12) < 1
    found = verdict(EXPECTED + 0.3 * limit, looked)
    assert (found.broken, found.in_float32, asked) == (None, {"one"}, [])
    found = verdict(EXPECTED + 0.8 * limit, looked)
    assert (found.broken, found.in_float32, asked) == (None, frozenset(), [{"one"}])
    assert verdict(EXPECTED + 0.8 * limit).broken is None
    assert verdict(EXPECTED + 1.3 * limit, looked).broken is not None


def test_what_rounds_too_much_in_pytorch_itself_is_unprovable() -> None:
    found = verdict(EXPECTED, reference=replace(REFERENCE, roundings=[{"y": Rounding(1.0, 1.0)}]))
    assert found.unprovable
