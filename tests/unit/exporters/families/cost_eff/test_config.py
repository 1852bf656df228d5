"""The reference model, pooling, exits, entropy and truncated SVD, and its configuration."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from nestforge.errors import CheckpointError
from nestforge.exporters.families.cost_eff.config import read_sidecar
from nestforge.exporters.families.cost_eff.loading import factorise
from nestforge.exporters.families.cost_eff.model import entropy
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.cost_eff_models import CONFIG, SIDECAR, changed, random_weights, save_folder, save_tiny, shapes_of

FULL = {"num_attention_heads": 4, "intermediate_size": 64}
HEADS = {str(layer): [0, 2] for layer in range(4)}


def _refused(folder: Path, message: str, config: Any = None, sidecar: Any = None, weights: Any = None) -> None:
    """The folder as CONFIG and SIDECAR have it, with ``config`` and ``sidecar`` changed after the weights were made."""
    given = weights if weights is not None else random_weights(shapes_of(CONFIG, SIDECAR))
    save_folder(folder / "m", changed(CONFIG, config or {}), changed(SIDECAR, sidecar or {}), given)
    with pytest.raises(CheckpointError) as failure:
        open_source(folder / "m")
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)
    assert len(str(failure.value)) < 400


def test_a_missing_sidecar(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    (folder / "cost_eff.json").unlink()
    with pytest.raises(CheckpointError, match=r"cost_eff\.json: cannot be read \(No such file"):
        open_source(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version '2', expected 1"),
        ({"schema_version": None}, "schema_version 'None', expected 1"),
        ({"exits": None}, "missing key 'exits'"),
        ({"embedding": None}, "missing key 'embedding'"),
        ({"exists": {}}, "unknown key 'exists'; did you mean 'exits'?"),
        ({"exits.pooling": "cls"}, "exits: unknown key 'pooling'; did you mean 'pool'?"),
        ({"exits.pool": "max"}, "exits: pool: got 'max'"),
        ({"exits.activation": None}, "exits: missing key 'activation'"),
        ({"exits.classes": 0}, "exits: classes: expected at least 1, got 0"),
        ({"exits.classes": "3"}, "exits: classes: expected a whole number, got str '3'"),
        ({"exits.activation": "relu"}, "exits: activation: got 'relu'"),
        ({"exits.last_n": 2}, "exits: last_n: expected 1, got 2"),
        ({"exits.layers": [1, 4, 3]}, "exits: layers: expected layer counts that increase from at least 1"),
        ({"exits.layers": [0, 4]}, "exits: layers: expected layer counts that increase from at least 1"),
        ({"exits.layers": []}, "exits: layers: expected layer counts that increase from at least 1"),
        (
            {"exits.layers": [1, 3], "gate.tau": 0.3},
            "exits: the last one is after layer 3, but config.json has num_hidden_layers 4",
        ),
        ({"exits.layers": [1, 2, 3, 4], "gate.tau": 0.3}, "tensor exits.2.weight is missing from the weights"),
        ({"exits.classes": 1}, "gate: an exit with 1 class is a regression"),
        ({"gate.tau": [0.3]}, "gate: tau: expected 2 numbers, one for every exit but the last"),
        ({"gate.tau": [0.3, 0.3, 0.3]}, "got a list of 3"),
        ({"gate.tau": True}, "gate: tau: expected a number, got bool True"),
        ({"gate.tau": ["0.4", 0.3]}, "gate: tau[0]: expected a number, got str '0.4'"),
        ({"gate.compare": ">"}, "gate: compare: got '>'"),
        ({"gate.criterion": "patience"}, "gate: criterion: got 'patience'"),
        ({"gate.rule": None}, "gate: missing key 'rule'"),
        ({"embedding": {"mode": "folded", "rank": 16}}, "embedding: mode: got 'folded'"),
        ({"embedding": {"mode": "factorised"}}, "embedding: mode factorised needs a rank"),
        ({"embedding": {"mode": "dense", "rank": 16}}, "embedding: mode dense has no rank"),
        ({"embedding": {"mode": "dense"}}, "word_embeddings.weight has shape [64, 16]; expected [64, 32]"),
        ({"embedding.rank": 8}, "word_embeddings.weight has shape [64, 16]; expected [64, 8]"),
    ],
)
def test_a_sidecar_that_cannot_be(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    _refused(tmp_path, message, sidecar=change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_size": None}, "config.json: missing key 'head_size'"),
        ({"head_size": 16}, "query.weight has shape [24, 32]; expected [48, 32]"),
        ({"num_attention_heads": 3}, "layer.1.attention.self.query.weight has shape [32, 32]; expected [24, 32]"),
        ({"num_attention_heads": [3, 4]}, "num_attention_heads: expected 4 numbers, one per layer, got 2"),
        ({"intermediate_size": [48, -1, 40, 0]}, "intermediate_size: expected whole numbers of at least 0, got -1"),
        ({"intermediate_size": [48, 64, 40, 8]}, "tensor encoder.layer.3.intermediate.dense.weight is missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most 1024, got 1000000000"),
        ({"hidden_act": "silu"}, "hidden_act: got 'silu'; expected one of gelu, gelu_new, relu"),
        ({"layer_norm_eps": 0}, "layer_norm_eps: expected at least 1e-30, got 0"),
        ({"pad_token_id": 64}, "pad_token_id: expected a token of the vocabulary, 0..63, or null, got 64"),
        ({"pad_token_id": -1}, "pad_token_id: expected a token, which fills a row up to its bucket, got none"),
        ({"pad_token_id": None}, "pad_token_id: expected a token, which fills a row up to its bucket, got none"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key' is not supported"),
        ({"num_labels": 7}, "num_labels, id2label: 7 classes, but cost_eff.json has exits of 3"),
        ({"id2label": {"0": "no", "1": "yes"}}, "num_labels, id2label: 2 classes, but cost_eff.json has exits of 3"),
        ({"granularities": {"depth": [0.5, 1]}}, "granularities: this model has no axis kind 'depth'"),
        ({"is_decoder": True}, "is_decoder: got True; expected one of False"),
        ({"problem_type": "multi_label_classification"}, "softmax entropy is undefined; remove the gate"),
        ({"problem_type": "single_label"}, "problem_type: got 'single_label'; did you mean"),
    ],
)
def test_a_configuration_that_cannot_be(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    _refused(tmp_path, message, config=change)


def test_nested_is_true_or_false(tmp_path: Path) -> None:
    assert open_source(save_tiny(tmp_path / "nested", {"nested": True})).spec.trained_nested
    with pytest.raises(CheckpointError, match="nested: expected true or false, got str 'no'"):
        open_source(save_tiny(tmp_path / "m", {"nested": "no"}))


def test_what_changes_nothing_may_be_said(tmp_path: Path) -> None:
    """Levels that training sampled become the default ones; the others are what a BERT configuration may say too."""
    levels = {"ffn": [0.5, 1], "heads": [0.5, 1]}
    said = {"position_embedding_type": "absolute", "attn_implementation": "eager", "quantization_config": None}
    source = open_source(save_tiny(tmp_path / "m", {**said, "num_labels": 3, "nested": True, "granularities": levels}))
    assert source.spec.granularities == {"ffn": (0.5, 1.0), "heads": (0.5, 1.0)}


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"1": [2, 4]}, "kept_heads.1: id 4 is outside 0..3, the stored heads"),
        ({"1": [-1, 2]}, "kept_heads.1: id -1 is outside 0..3, the stored heads"),
        ({"1": [2, 0]}, "kept_heads.1: expected ascending ids without repetition, got 2 then 0"),
        ({"1": [2, 2]}, "kept_heads.1: expected ascending ids without repetition, got 2 then 2"),
        ({"1": None}, "kept_heads: layer 1 is missing"),
        ({"4": [0]}, "kept_heads: '4' is no layer; expected 0..3"),
        ({"1": [0.5]}, "kept_heads.1[0]: expected a whole number"),
    ],
)
def test_kept_ids_that_cannot_be(tmp_path: Path, kept: dict[str, Any], message: str) -> None:
    weights = random_weights(shapes_of(changed(CONFIG, FULL), SIDECAR))
    _refused(tmp_path, message, FULL, {"kept_heads": changed(HEADS, kept)}, weights)


def test_kept_ids_for_weights_that_are_sliced_already(tmp_path: Path) -> None:
    _refused(tmp_path, "expected [32, 32] as config.json and cost_eff.json say", FULL, {"kept_heads": HEADS})


def test_tensors_without_a_place(tmp_path: Path) -> None:
    weights = random_weights(shapes_of(CONFIG, SIDECAR))
    leftovers = {
        "pooler.dense.weight": torch.ones(1),
        "exits.2.weight": torch.ones(1),
        "cls.predictions.bias": torch.ones(1),
    }
    open_source(save_folder(tmp_path / "leftovers", CONFIG, SIDECAR, {**weights, **leftovers}))
    deeper = {**weights, "encoder.layer.4.output.dense.bias": torch.ones(32)}
    _refused(tmp_path, "tensor 'encoder.layer.4.output.dense.bias' has no place in the model", weights=deeper)


@pytest.mark.parametrize(("tau", "expected"), [(0.25, (0.25, 0.25)), ([-1, 0.5], (-1.0, 0.5))])
def test_one_threshold_stands_for_every_exit_but_the_last(tmp_path: Path, tau, expected) -> None:
    assert read_sidecar(save_tiny(tmp_path / "m", sidecar={"gate.tau": tau})).thresholds == expected


def test_without_a_gate_there_are_no_thresholds(tmp_path: Path) -> None:
    assert read_sidecar(save_tiny(tmp_path / "m", sidecar={"gate": None})).thresholds is None


IDS = torch.randint(4, 60, (2, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])


@pytest.mark.parametrize("pool", ["cls", "mean", "mean_with_padding"])
@pytest.mark.parametrize("activation", ["tanh", "none"])
def test_exits_by_hand(tmp_path: Path, pool: str, activation: str) -> None:
    folder = save_tiny(tmp_path / "m", sidecar={"exits.pool": pool, "exits.activation": activation})
    model = load_universal(open_source(folder)).module.model
    states = [state.numpy().astype(np.float64) for state in model.hidden_states(IDS, MASK)]
    weights = {name: data.numpy() for name, data in model.named_parameters()}
    mask = MASK.numpy()[:, :, None]
    for layer in (1, 3, 4):
        hidden = states[layer]
        pooled = {
            "cls": hidden[:, 0],
            "mean": (hidden * mask).sum(1) / mask.sum(1),
            "mean_with_padding": hidden.mean(1),
        }[pool]
        z = (np.tanh(pooled) if activation == "tanh" else pooled) @ weights[f"exits.{layer}.weight"].T
        z += weights[f"exits.{layer}.bias"]
        p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
        logits, found = model.answer(layer, model.hidden_states(IDS, MASK)[layer], MASK)
        np.testing.assert_allclose(logits, z, atol=1e-5)
        np.testing.assert_allclose(found, -(p * np.log(p)).sum(-1), atol=1e-5)
    torch.testing.assert_close(model(IDS, MASK), (logits, found))


def test_a_row_without_real_tokens_is_finite(tmp_path: Path) -> None:
    model = load_universal(open_source(save_tiny(tmp_path / "m", sidecar={"exits.pool": "mean"}))).module.model
    assert all(torch.isfinite(output).all() for output in model(IDS, MASK * 0))


@pytest.mark.parametrize("gap", [0.0, 1.0, 17.0, 18.0, 90.0, 1e4, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_entropy_of_a_gap(gap: float, dtype: torch.dtype) -> None:
    gap = min(gap, torch.finfo(dtype).max)
    found = entropy(torch.tensor([[gap, 0.0]], dtype=dtype))
    q = math.exp(-gap)
    exact = math.log1p(q) + gap * q / (1 + q)  # of a gap g between two classes: ln(1 + e^-g) + g e^-g / (1 + e^-g)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(exact, rel=1e-3 if dtype == torch.float16 else 1e-5, abs=1e-7)


@given(arrays(np.float32, (3, 5), elements=st.floats(-(2.0**120), 2.0**120, width=32)))
def test_entropy_is_a_number_between_none_and_uniform(logits: np.ndarray) -> None:
    found = entropy(torch.from_numpy(logits))
    assert ((found >= 0) & (found <= math.log(5) + 1e-6)).all()


@given(arrays(np.float32, (2, 4), elements=st.floats(-20, 20, width=32)), st.floats(-50, 50))
def test_entropy_does_not_see_a_common_shift(logits: np.ndarray, shift: float) -> None:
    moved = entropy(torch.from_numpy(logits) + shift)
    torch.testing.assert_close(moved, entropy(torch.from_numpy(logits)), atol=1e-4, rtol=1e-3)


def test_factors_are_the_best_of_their_rank_and_a_prefix_of_all() -> None:
    table = torch.randn(50, 12, generator=torch.Generator().manual_seed(0))
    w1, w2 = factorise(table, 5)
    values = torch.linalg.svdvals(table)
    assert torch.dist(w1 @ w2, table).item() == pytest.approx(values[5:].square().sum().sqrt().item(), rel=1e-5)
    torch.testing.assert_close(w1.norm(dim=0), values[:5])  # W1 = U_R S_R
    torch.testing.assert_close(w2 @ w2.T, torch.eye(5))  # W2 = V_R^T
    whole = factorise(table, 12)
    torch.testing.assert_close((w1, w2), (whole[0][:, :5], whole[1][:5]))


def test_a_factorised_lookup_equals_rows_of_the_product(tmp_path: Path) -> None:
    table = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    w1, w2 = factorise(table, 16)
    embeddings = load_universal(open_source(save_tiny(tmp_path / "m"))).module.model.embeddings
    embeddings.word_embeddings.weight.data, embeddings.word_projection.weight.data = w1, w2.T.contiguous()
    factorised = embeddings(IDS, None)
    embeddings.word_embeddings.weight.data, embeddings.word_projection = w1 @ w2, None
    torch.testing.assert_close(factorised, embeddings(IDS, None), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rank", [0, 13])
def test_a_rank_that_no_table_has(rank: int) -> None:
    with pytest.raises(CheckpointError, match=rf"embedding \[50, 12\]: expected a rank of 1\.\.12, got {rank}"):
        factorise(torch.zeros(50, 12), rank)
