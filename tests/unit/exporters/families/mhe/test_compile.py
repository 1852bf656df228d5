"""Tiny MHE models through the whole compiler: every form passes the gate, over views of one weight store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nestforge
import pytest
import torch
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.verify import verify_bundle
from nestforge.elastic import Bucket
from nestforge.errors import PlanError
from nestforge.exporters.source import open_source
from nestforge.runtime.bundle.manifest import WEIGHTS_NAME
from nestforge.runtime.bundle.open_bundle import Bundle, open_bundle
from safetensors import safe_open
from support.tensorrt_takes import assert_tensorrt_takes
from support.tiny_compile import board
from support.tiny_mhe import save_tiny_mhe

FORMS = {
    "mhe_add": ("normal", "shared_scores", "expanded_queries", "expanded", "literal"),
    "mhe_mul": ("normal", "expanded_queries", "expanded", "literal"),
}
ONE_LAYER = {"num_hidden_layers": 1, "attention_bias": True}
# One static shape and a range, and a submodel that keeps three heads.
BUCKETS, NARROW = (Bucket(2, 8), Bucket(2, 24, 1, 1)), "ffn24-heads3"


def compiled(folder: Path, form: str, decoder: bool = False, **settings: Any) -> Bundle:
    model = save_tiny_mhe(folder / "m", decoder, **settings)
    profile = board(budgets={"full": {}}, buckets=[str(bucket) for bucket in BUCKETS])
    return open_bundle(
        compile_bundle(model, profile, folder / "b", submodels=[NARROW], variants={"attention": form}, measure=False)
    )


def stored(bundle: Bundle) -> dict[str, tuple[int, ...]]:
    with safe_open(bundle.file(WEIGHTS_NAME), framework="numpy") as store:
        names = store.keys()
        return {name: tuple(store.get_slice(name).get_shape()) for name in names if not name.startswith("table.")}


@pytest.mark.parametrize(("kind", "form"), [(kind, form) for kind, forms in FORMS.items() for form in forms])
def test_every_form_passes_the_gate_and_slices(tmp_path: Path, kind: str, form: str) -> None:
    bundle = compiled(tmp_path, form, decoder=kind == "mhe_add", attention=kind, **ONE_LAYER)
    engines = bundle.manifest.engines
    assert {engine.submodel for engine in engines} == {"ffn48-heads4", NARROW}
    for engine in engines:
        assert (engine.variants, engine.emitted, engine.slice_problem) == ({"attention": form}, "sliced", None)
        assert engine.parity is not None
        assert engine.private_bytes < 3000
    assert verify_bundle(bundle.path, against=tmp_path / "m")
    assert_tensorrt_takes(bundle.path)


def names_below_attention(bundle: Bundle) -> set[str]:
    return {name.partition(".attention.")[2] for name in stored(bundle) if ".attention." in name}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("mhe_mul", {"query.weight", "key.weight", "value.weight", "folded.query", "folded.output.T"}),
        (
            "mhe_add",
            {"query.weight", "folded.key", "value.weight", "embedding.query", "embedding.value", "output.weight.T"},
        ),
    ],
)
def test_the_store_has_what_the_normal_form_reads_and_no_more(tmp_path: Path, kind: str, names: set[str]) -> None:
    """Neither keys' head embeddings nor what was folded away, and never more than the literal engine reads."""
    normal = compiled(tmp_path / "n", "normal", attention=kind, num_hidden_layers=1)
    assert names_below_attention(normal) == names
    literal = compiled(tmp_path / "l", "literal", attention=kind, num_hidden_layers=1)
    for one, other in zip(normal.manifest.engines, literal.manifest.engines, strict=True):
        assert one.submodel == other.submodel
        assert one.weight_bytes <= other.weight_bytes


def test_engines_answer_as_the_model_does(tmp_path: Path) -> None:
    bundle = compiled(tmp_path, "normal", attention="mhe_mul")
    universal = nestforge_model(tmp_path / "m")
    ids, mask = torch.randint(0, 40, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
    mask[0, 5:] = 0
    with nestforge.load(bundle.path) as model:
        answer = model({"input_ids": ids.numpy(), "attention_mask": mask.numpy()}, submodel="ffn48-heads4")
    expected = universal(ids, mask)
    torch.testing.assert_close(torch.from_numpy(answer.outputs["last_hidden_state"]), expected, rtol=0, atol=1e-4)


def nestforge_model(folder: Path) -> torch.nn.Module:
    from nestforge.exporters.families.mhe.folder import load_model

    return load_model(folder)


@pytest.mark.parametrize("kind", ["mha", "sha", "mqa", "skv", "el_att"])
def test_the_other_kinds(tmp_path: Path, kind: str) -> None:
    folder = save_tiny_mhe(tmp_path / "m", attention=kind, num_hidden_layers=1)
    kept = "ffn24-heads3" if "heads" in open_source(folder).spec.kinds else "ffn24"
    profile = board(budgets={"full": {}}, buckets=["2x8"])
    bundle = open_bundle(compile_bundle(folder, profile, tmp_path / "b", submodels=[kept], measure=False))
    for engine in bundle.manifest.engines:
        assert (engine.variants, engine.slice_problem) == (None, None)
        assert engine.parity is not None


def test_a_form_that_does_not_hold_stops_before_any_work(tmp_path: Path) -> None:
    folder = save_tiny_mhe(tmp_path / "m", position="rotary")
    with pytest.raises(PlanError, match=r"^variant attention=normal: rotary positions turn keys after their head emb"):
        compile_bundle(folder, board(), tmp_path / "b", variants={"attention": "normal"})
    assert not (tmp_path / "b").exists()


def test_integers_of_folded_weights_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_mhe(tmp_path / "m", num_hidden_layers=1)
    problem = (
        r"^precision int8: engines in the variants chosen read layers.0.attention.folded.output, which is made of "
    )
    with pytest.raises(PlanError, match=problem):
        compile_bundle(folder, board(precision=["int8"], variants={"attention": "normal"}), tmp_path / "b")
