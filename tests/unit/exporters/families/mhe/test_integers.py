"""Integers of folded tensors: every form passes both halves of the gate, and another function than the model fails."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import onnx
import pytest
import torch
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.graph.encodings import encode
from nestforge.compiler.graph.store import write_store
from nestforge.compiler.graph.stored_numbers import StoredNumbers
from nestforge.errors import ParityError
from nestforge.exporters.families.mhe import attention as folds
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from safetensors import safe_open
from support.tiny_compile import board
from support.tiny_mhe import FAR, save_tiny_mhe

# Heads of 16, since products with fewer outputs stay float32.
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "head_dim": 16,
    "intermediate_size": 64,
    "attention_bias": True,
}
WHOLE, NARROW = "ffn64-heads3", "ffn32-heads2"
WHOLE_LEVELS = {"ffn": (1.0,), "heads": (1.0,)}
# Weights that are made of several, as the form reads them in integers.
FOLDED = {
    ("mhe_add", "normal"): {"folded.key"},
    ("mhe_add", "shared_scores"): {"folded.key"},
    ("mhe_add", "one_exponential"): {"folded.key"},
    ("mhe_add", "expanded_queries"): {"folded.key", "folded.queries.weight"},
    ("mhe_add", "expanded"): {"expanded.query.weight", "expanded.key.weight", "expanded.value.weight"},
    ("mhe_mul", "normal"): {"folded.output.T"},
    ("mhe_mul", "expanded_queries"): {"folded.output.T", "folded.queries.weight"},
    ("mhe_mul", "expanded"): {"expanded.query.weight", "expanded.key.weight", "expanded.value.weight"},
    ("mhe_mul", "literal"): set(),
}
Compiled = Callable[[str, str], Bundle]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The int8-dynamic encoder of a kind in a form; its folder lies beside it."""

    @cache
    def of(kind: str, form: str) -> Bundle:
        folder = tmp_path_factory.mktemp("mhe")
        save_tiny_mhe(folder / "m", far=FAR if form == "one_exponential" else 1.0, attention=kind, **SHAPE)
        return open_bundle(_compile(folder, "int8-dynamic", form, submodels=[NARROW]))

    return of


def _compile(folder: Path, precision: str, form: str, **options: Any) -> Path:
    profile = board(budgets={"full": {}}, buckets=["2x8"], variants={"attention": form}, precision=[precision])
    return compile_bundle(folder / "m", profile, folder / "b", levels=WHOLE_LEVELS, **options)


def _integers(bundle: Bundle) -> set[str]:
    """Names below attention of the tensors that the store has in 8 bits."""
    with safe_open(bundle.file(WEIGHTS_NAME), framework="numpy") as store:
        names = [name.partition(".attention.")[2] for name in store.keys()]  # noqa: SIM118
    return {name.removesuffix(".int8") for name in names if name.endswith(".int8")}


@pytest.mark.parametrize(("kind", "form"), FOLDED)
def test_every_form_passes_the_gate(compiled: Compiled, kind: str, form: str) -> None:
    bundle = compiled(kind, form)
    assert {engine.submodel for engine in bundle.manifest.engines} == {WHOLE, NARROW}
    for engine in bundle.manifest.engines:
        assert (engine.variants, engine.emitted, engine.precision) == ({"attention": form}, "sliced", "int8-dynamic")
        assert "without the rounding of activations" in engine.parity.rule
    assert {name for name in _integers(bundle) if name.startswith(("folded", "expanded"))} == FOLDED[kind, form]


def test_heads_of_form_b_have_the_codes_of_what_they_share(compiled: Compiled) -> None:
    """Up to signs, and 0 where a factor is: so one product of the literal form, times factors, is all of form B's."""
    universal = load_universal(open_source(compiled("mhe_mul", "expanded").path.with_name("m")))
    for role in ("query", "key", "value"):
        at = f"layers.0.attention.{role}.weight"
        shared = encode(universal.stored()(at).numpy(), f"{at}.int8").astype(int)
        signs = np.sign(universal.module.model.layers[0].attention.factors(role).numpy()).astype(int)  # [n, d]
        expected = (signs[..., None] * shared).reshape(-1, shared.shape[1])
        expanded = universal.stored()(f"layers.0.attention.expanded.{role}.weight").numpy()
        np.testing.assert_array_equal(encode(expanded, "w.int8"), expected)


def test_one_product_serves_all_heads(compiled: Compiled) -> None:
    """The literal form and the normal one multiply integers once for queries, and tell heads apart afterwards."""
    for form in ("literal", "normal"):
        bundle = compiled("mhe_mul", form)
        engine = next(engine for engine in bundle.manifest.engines if engine.submodel == WHOLE)
        graph = onnx.load(bundle.file(engine.file), load_external_data=False).graph
        read = [node.input[3] for node in graph.node if node.op_type == "QGemm" and "query" in node.input[3]]
        assert read == ["layers.0.attention.query.weight.int8"]


def test_a_form_that_is_another_function_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store and PyTorch in that form agree with each other, and both are so near that the angle of integers holds:
    the form itself is held against the module as it is written."""
    factors = folds._factors
    monkeypatch.setattr(folds, "_factors", lambda attention, role: factors(attention, role) * 1.001)
    save_tiny_mhe(tmp_path / "m", **SHAPE)
    with pytest.raises(ParityError, match=r"^engine \S+: its variants are not the model in PyTorch: .*; allowed abs"):
        _compile(tmp_path, "int8-dynamic", "normal")
    assert not (tmp_path / "b").exists()


def test_stored_numbers_take_the_place_of_folded_tensors(tmp_path: Path) -> None:
    """Integers as they were rounded, of the universal model, and what stays float32 as it was made of its weights."""
    universal = load_universal(open_source(save_tiny_mhe(tmp_path / "m", **SHAPE)))
    at = "layers.0.attention"
    integers = {f"{at}.folded.output.T.int8", f"{at}.query.weight.int8"}
    names = {f"{at}.folded.query", *integers, *(f"{name}-scale" for name in integers)}
    files = write_store(universal, names, {}, tmp_path)
    stored, narrow = StoredNumbers(universal, files, tmp_path).in_model(names), universal.spec.parse(NARROW)
    assert stored.folded.keys() == {f"{at}.folded.output", f"{at}.folded.query"}
    form = stored.narrow(narrow, {"attention": "normal"})
    attention: Any = form.get_submodule("model.layers.0.attention")
    torch.testing.assert_close(attention.folded.query, universal.stored()(f"{at}.folded.query")[:2], rtol=0, atol=0)
    own = universal.stored()(f"{at}.folded.output")[:, :32]
    steps = universal.stored()(f"{at}.folded.output").abs().amax(1, keepdim=True) / 63
    assert ((attention.folded.output - own).abs() <= steps * 0.501).all()
    assert not attention.folded.output.equal(own)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_other_integers(tmp_path: Path, precision: str) -> None:
    save_tiny_mhe(tmp_path / "m", attention="mhe_add", **SHAPE)
    ids = np.random.default_rng(0).integers(0, 40, (120, 8))
    np.savez(tmp_path / "rows.npz", input_ids=ids, attention_mask=np.ones_like(ids))
    examples = {"data": tmp_path / "rows.npz"} if precision == "int8" else {}
    bundle = open_bundle(_compile(tmp_path, precision, "shared_scores", **examples))
    (engine,) = bundle.manifest.engines
    assert (engine.precision, engine.variants) == (precision, {"attention": "shared_scores"})
    with safe_open(bundle.file(WEIGHTS_NAME), framework="numpy") as store:
        assert f"layers.0.attention.folded.key.{precision}" in store.keys()  # noqa: SIM118


def test_engines_that_keep_a_cache(tmp_path: Path) -> None:
    """They attend in the normal form, and the whole pass that proves them has the keys of that form. One of fewer heads
    is a slice as any."""
    model = save_tiny_mhe(tmp_path / "m", decoder=True, **SHAPE)
    device = board(precision=["int8-dynamic"], buckets=["1x8"], variants={"attention": "literal"}, budgets={"full": {}})
    options: dict[str, Any] = {"submodels": [NARROW], "levels": WHOLE_LEVELS, "measure": False}
    path = nestforge.compile(model, device, tmp_path / "b", generate=True, **options)
    entry = open_bundle(path).manifest.generation
    assert {(engine.submodel, engine.emitted) for engine in entry.engines} == {(WHOLE, "sliced"), (NARROW, "sliced")}
    for engine in entry.engines:
        assert "without the rounding of activations" in engine.parity.rule
    assert "folded.output.T" in _integers(open_bundle(path))
