"""Tiny MHE models through the whole compiler: every form passes the gate, over views of one weight store."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.verify import verify_bundle
from nestforge.exporters.source import open_source
from safetensors import safe_open
from support.tiny_compile import assert_tensorrt_takes, board
from support.tiny_mhe import FAR, save_tiny_mhe

FORMS = {
    "mhe_add": ("normal", "shared_scores", "one_exponential", "expanded_queries", "expanded", "literal"),
    "mhe_mul": ("normal", "one_head", "expanded_queries", "expanded", "literal"),
}
EVERY_FORM = [(kind, form) for kind, forms in FORMS.items() for form in forms]
# A range, and a submodel that keeps three heads beside the universal one.
BUCKET, WHOLE, NARROW = Bucket(2, 8, 1, 1), "ffn48-heads4", "ffn24-heads3"
Compiled = Callable[[str, str], Bundle]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The bundle of a kind in a form, of one layer with biases: decoders of mhe_add, encoders of mhe_mul. The model's
    folder lies beside it."""

    @cache
    def of(kind: str, form: str) -> Bundle:
        folder = tmp_path_factory.mktemp("mhe")
        far = FAR if form == "one_exponential" else 1.0
        save_tiny_mhe(folder / "m", kind == "mhe_add", far, attention=kind, num_hidden_layers=1, attention_bias=True)
        profile = board(budgets={"full": {}}, buckets=[str(BUCKET)], variants={"attention": form})
        options: dict[str, Any] = {"submodels": [NARROW], "levels": {"ffn": (1.0,), "heads": (1.0,)}}
        return open_bundle(compile_bundle(folder / "m", profile, folder / "b", **options))

    return of


@pytest.mark.parametrize(("kind", "form"), EVERY_FORM)
def test_every_form_passes_the_gate_and_slices(compiled: Compiled, kind: str, form: str) -> None:
    bundle = compiled(kind, form)
    assert {engine.submodel for engine in bundle.manifest.engines} == {WHOLE, NARROW}
    for engine in bundle.manifest.engines:
        assert (engine.variants, engine.emitted, engine.slice_problem) == ({"attention": form}, "sliced", None)
        assert engine.parity is not None
        assert engine.private_bytes < 512, "no table of heads outside the store"
    assert [(proof.suite, proof.subject) for proof in bundle.manifest.proofs] == [("slice", NARROW)]
    if form != "one_head":  # an operator of ONNX Runtime's own
        assert_tensorrt_takes(bundle.path)


# Below the attention of a layer.
SEEDS, EXPANDED = ("query.weight", "query.bias", "value.weight", "value.bias"), ("query", "key", "value")
READ = {
    ("mhe_mul", "normal"): {*SEEDS, "key.weight", "folded.query", "folded.output.T"},
    ("mhe_mul", "one_head"): {*SEEDS, "key.weight", "folded.query", "folded.output.T"},
    ("mhe_mul", "expanded"): {f"expanded.{role}.{kind}" for role in EXPANDED for kind in ("weight", "bias")}
    | {"output.weight.T"},
    ("mhe_mul", "expanded_queries"): {
        *SEEDS[2:],
        "key.weight",
        "folded.queries.weight",
        "folded.queries.bias",
        "folded.output.T",
    },
    ("mhe_add", "normal"): {*SEEDS, "folded.key", "embedding.query", "embedding.value", "output.weight.T"},
    ("mhe_add", "shared_scores"): {*SEEDS, "folded.key", "embedding.query", "embedding.value", "output.weight.T"},
    ("mhe_add", "one_exponential"): {*SEEDS, "folded.key", "embedding.query", "embedding.value", "output.weight.T"},
}


@pytest.mark.parametrize(("kind", "form"), READ)
def test_the_store_has_what_a_form_reads_and_no_more(compiled: Compiled, kind: str, form: str) -> None:
    """Neither head embeddings of keys, nor a bias of theirs, nor what was folded away."""
    with safe_open(compiled(kind, form).file(WEIGHTS_NAME), framework="numpy") as store:
        below = {name.partition(".attention.")[2] for name in store.keys() if ".attention." in name}  # noqa: SIM118
    assert below == READ[kind, form] | {"output.bias"}


@pytest.mark.parametrize(("kind", "form"), [("mhe_mul", "normal"), ("mhe_add", "shared_scores")])
def test_it_is_still_the_model_that_it_came_from(compiled: Compiled, kind: str, form: str) -> None:
    """Heads are ranked; their order is found again by what the store has of them."""
    bundle = compiled(kind, form)
    assert bundle.manifest.ranking.method == "magnitude"
    assert verify_bundle(bundle.path, against=bundle.path.with_name("m"))


@pytest.mark.parametrize("kind", ["sha", "el_att"])
def test_the_other_kinds(tmp_path: Path, kind: str) -> None:
    folder = save_tiny_mhe(tmp_path / "m", attention=kind, num_hidden_layers=1)
    heads = "heads" in open_source(folder).spec.kinds
    levels = {"ffn": (1.0,), "heads": (1.0,)} if heads else {"ffn": (1.0,)}
    profile = board(budgets={"full": {}}, buckets=["2x8"])
    options: dict[str, Any] = {"submodels": [NARROW if heads else "ffn24"], "levels": levels}
    bundle = open_bundle(compile_bundle(folder, profile, tmp_path / "b", **options))
    for engine in bundle.manifest.engines:
        assert (engine.variants, engine.emitted, engine.slice_problem) == (None, "sliced", None)
        assert engine.parity is not None
