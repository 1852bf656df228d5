"""Where rows leave by their entropies, and which of those decisions rounding may turn."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.parity import prove_exits as module
from nestforge.compiler.parity.compare import tolerance_for
from nestforge.compiler.parity.prove_exits import expected_exits
from nestforge.errors import ParityError
from nestforge.runtime.exits.policy import ExitPolicy
from support.cost_eff_models import save_tiny
from support.tiny_compile import board

ENTROPIES = np.array([[0.1, 0.9, 0.5, 0.9], [0.9, 0.2, 0.1, 0.31], [0.0, 0.0, 0.0, 0.0]], np.float32)


def test_the_first_exit_that_is_certain_answers_and_the_last_always_does() -> None:
    index, tie = expected_exits(ENTROPIES, ExitPolicy((0.4, 0.3)), error=0.001)
    assert index.tolist() == [0, 1, 1, 2]
    assert tie.tolist() == [False] * 4


def test_a_near_tie_counts_only_on_the_way() -> None:
    _, tie = expected_exits(ENTROPIES, ExitPolicy((0.4, 0.3)), error=0.02)
    assert tie.tolist() == [False, False, False, True]
    _, tie = expected_exits(ENTROPIES, ExitPolicy((0.4, 0.89)), error=0.02)
    assert tie.tolist() == [False] * 4, "row 0 left before the exit where its entropy is near"


@given(
    arrays(np.float32, (3, 6), elements=st.sampled_from([0.0, 0.125, 0.25, 0.5])),
    st.tuples(*[st.sampled_from([-1.0, 0.0, 0.125, 0.25])] * 2),
    st.sampled_from(["<", "<="]),
)
def test_like_a_loop_over_rows(entropy: np.ndarray, thresholds: tuple[float, float], compare) -> None:
    index, _ = expected_exits(entropy, ExitPolicy(thresholds, compare), error=0.0)
    for row in range(entropy.shape[1]):
        answers = 2
        for exit_index in (1, 0):
            value, threshold = entropy[exit_index, row], thresholds[exit_index]
            if value < threshold or (compare == "<=" and value == threshold):
                answers = exit_index
        assert index[row] == answers


@pytest.mark.parametrize(
    ("wrong", "suite"),
    [
        (lambda index, tie: (index * 0 + 1, tie), "decision suite"),
        (lambda index, tie: (index, tie | (np.arange(len(tie)) == 0)), None),
        (lambda index, tie: (index, tie | True), None),
    ],
)
def test_a_wrong_decision_stops_the_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong, suite) -> None:
    true = module.expected_exits
    monkeypatch.setattr(module, "expected_exits", lambda *arguments: wrong(*true(*arguments)))
    folder, profile = save_tiny(tmp_path / "m"), board(buckets=["4x8"], budgets={"full": {}})
    if suite is None:  # near ties are listed, not counted
        bundle = compile_bundle(folder, profile, tmp_path / "b", include="budgets")
        assert (bundle / "manifest.json").read_text().count("case whole, row 0") >= 2
    else:
        with pytest.raises(ParityError, match=suite):
            compile_bundle(folder, profile, tmp_path / "b", include="budgets")
        assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("error", [1e-5, 3.0])
def test_a_chain_that_lets_no_row_leave_is_found_or_nothing_is_proved(error: float) -> None:
    rng = np.random.default_rng(0)
    case = SimpleNamespace(name="c", request=None)
    references = [SimpleNamespace(case=case, entropy=rng.uniform(0, 1, (3, 8)))]
    chain = SimpleNamespace(run=lambda feeds, policy: SimpleNamespace(index=np.full(8, 2)))
    policy = ExitPolicy((2.0, 2.0), name="all leave at once")
    if error > 1:
        with pytest.raises(ParityError, match="8 of 8 rows have an entropy within 3 of a threshold"):
            module._decisions(chain, policy, references, error, 3, "m")
    else:
        assert module._decisions(chain, policy, references, error, 3, "m").worst == 8


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("off", [1e-3, np.nan])
def test_a_row_is_composed_within_its_own_rounding(row: int, off: float) -> None:
    """An error of PyTorch's float32 in the first row alone widens the limit of no other."""
    index, order = np.zeros(2, int), np.arange(2)
    logits, limit = np.ones((2, 3)), tolerance_for("fp32", 2)
    other = logits.copy()
    other[row, 1] += off
    pair = (SimpleNamespace(index=index, logits=logits), SimpleNamespace(index=index, logits=other), order)
    own = np.array([[5e-4, 1e-7], [9.0, 9.0]])  # the second exit answers no row
    reference = SimpleNamespace(entropy=np.zeros((2, 2)), own=own)
    proof = module._composed([(reference, [pair])], ExitPolicy((1.0,)), 1e-6, limit, "m")
    assert proof.limit == limit.atol
    assert (proof.worst <= proof.limit) == (row == 0 and off == 1e-3)
