"""Proofs beyond the gate: slices, exits, and texts beside sentence-transformers."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from nestforge.bundle.manifest import Proof
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.parity import prove_exits as module
from nestforge.compiler.parity.compare import tolerance_for
from nestforge.compiler.parity.prove import prove_slice, prove_texts
from nestforge.compiler.parity.prove_exits import expected_exits
from nestforge.elastic import Submodel
from nestforge.errors import ParityError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.runtime.exits.policy import ExitPolicy
from nestforge.runtime.summary import detail_tables
from support.cost_eff_models import save_tiny
from support.sentence_folders import HIDDEN, Layout, classes
from support.tiny_compile import BUCKET, board


def proofs(builder: EngineBuilder, submodel: str) -> list[Proof]:
    parsed = builder.universal.spec.parse(submodel)
    return list(prove_slice(parsed, BUCKET, builder.references))


@pytest.mark.parametrize("submodel", ["ffn8", "heads1", "ffn8_24-heads1_2"])
def test_narrowing_keeps_what_it_keeps(builder: EngineBuilder, submodel: str) -> None:
    (proof,) = proofs(builder, submodel)
    assert proof.suite == "slice"
    assert 0 <= proof.worst <= proof.limit
    assert proof.checked == len(builder.cases[BUCKET])


def test_the_universal_model_needs_no_proof(builder: EngineBuilder) -> None:
    assert proofs(builder, builder.universal.spec.universal().id) == []


def test_a_narrowing_that_takes_other_steps_is_found(builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last heads instead of the first."""
    narrow = type(builder.universal).narrow

    def wrong(self: Any, submodel: Submodel) -> Any:
        module: Any = narrow(self, submodel)
        if not submodel.is_universal:
            last = self.module.model.encoder.layer[0].intermediate.dense.weight.data[-8:]
            module.model.encoder.layer[0].intermediate.dense.weight = torch.nn.Parameter(last, requires_grad=False)
        return module

    monkeypatch.setattr(type(builder.universal), "narrow", wrong)
    (proof,) = proofs(builder, "ffn8")
    assert proof.worst > proof.limit


def test_the_weights_are_left_as_they_were(builder: EngineBuilder) -> None:
    before = {name: data.clone() for name, data in builder.universal.parameters().items()}
    proofs(builder, "ffn8-heads1")
    assert all(torch.equal(data, before[name]) for name, data in builder.universal.parameters().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-4])
@pytest.mark.parametrize("case", [0, -1], ids=["first case", "last case"])
def test_what_is_no_number_and_what_every_precision_would_allow_break_the_limit(
    builder: EngineBuilder, monkeypatch: pytest.MonkeyPatch, value: float, case: int
) -> None:
    """One bias of the narrowed module, on one case alone."""
    submodel, cases = builder.universal.spec.parse("ffn8"), builder.cases[BUCKET]
    module, passes = builder.references.of(submodel).module, iter(range(len(cases)))

    def add(module: torch.nn.Module, inputs: object, outputs: Any) -> Any:
        first, *rest = outputs
        if first.dtype != torch.float64:
            return None
        return (first + value if next(passes) == case % len(cases) else first, *rest)

    handle = module.register_forward_hook(add)
    try:
        (proof,) = proofs(builder, "ffn8")
    finally:
        handle.remove()
    assert not proof.worst <= proof.limit
    assert proof.limit == 1e-9


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Layout(
        "two-dimensional",
        lambda m: [m.Pooling(HIDDEN), m.LayerNorm(HIDDEN), m.Dense(HIDDEN, 12), m.Normalize()],
        config={"prompts": {"query": "time budget ", "passage": "a "}, "default_prompt_name": "query"},
    ).write(tmp_path_factory.mktemp("texts") / "m")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    return nestforge.compile(
        folder,
        board(buckets=["1..8x1..16"], budgets={"full": {}}),
        output=folder.with_name("b"),
        exits=(1,),
        submodels=["depth1", "ffn16", "depth2"],
        dimensions=(8, 4),
    )


def test_every_depth_and_cut_is_that_of_the_library(folder: Path, bundle: Path) -> None:
    manifest = nestforge.open_bundle(bundle).manifest
    assert [receipt.submodel for receipt in manifest.texts] == ["depth2-ffn32-heads2", "depth1-ffn32-heads2"]
    for receipt in manifest.texts:
        assert receipt.library.startswith("sentence-transformers 6.")
        assert receipt.stages == ("tokenizer", "prompts", "layers", "Pooling", "LayerNorm", "Dense", "Normalize")
        assert receipt.cases == ("texts 1 to 6", "texts 7 to 7", "texts 1 to 6, prompt passage")
        names = [output.name for output in receipt.outputs]
        assert names == ["sentence_embedding", "sentence_embedding in 8", "sentence_embedding in 4"]
        assert all(output.max_abs < 1e-5 and output.min_cosine > 1 - 1e-6 for output in receipt.outputs)
    shown = detail_tables(manifest)["Texts"]
    assert len(shown.rows) == 6
    assert "## Texts" in (bundle / "report.md").read_text()
    report = nestforge.verify(bundle, against=folder)
    assert [v.engine for v in report.engines if "texts" in v.engine] == [
        f"{receipt.submodel}, texts" for receipt in manifest.texts
    ]
    assert report


def test_another_prompt_and_another_module_are_found(
    folder: Path,
    bundle: Path,
    edit_manifest: Callable[[Path, Callable[[dict[str, Any]], object]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    universal = load_universal(open_source(folder, (1,), dimensions=(8, 4)))
    opened = nestforge.open_bundle(bundle)
    with monkeypatch.context() as patch:
        patch.setattr(classes().Normalize, "forward", lambda _, features: features)
        with pytest.raises(
            ParityError, match=r"^texts, depth2-ffn32-heads2: beside sentence-transformers 6\S+, output sentence_emb"
        ):
            prove_texts(opened, universal)
    with monkeypatch.context() as patch:
        patch.setattr("nestforge.exporters.sentence_transformers.library.find_spec", lambda _: None)
        assert prove_texts(opened, universal) == ()
        verdicts = [v.problem for v in nestforge.verify(bundle, against=folder).engines if "texts" in v.engine]
        assert [problem is not None and "needs sentence-transformers" in problem for problem in verdicts] == [True] * 2
    edit_manifest(bundle, lambda data: data["text"].update(default_prompt="passage"))
    with pytest.raises(ParityError, match=r"^texts, depth2-ffn32-heads2: beside"):
        prove_texts(nestforge.open_bundle(bundle), universal)
