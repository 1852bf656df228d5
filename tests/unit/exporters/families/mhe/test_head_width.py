"""The width of heads as an axis, through the whole compiler: engines of narrow heads are views of one weight store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nestforge
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.verify import verify_bundle
from nestforge.exporters.checkpoints.own_folder import save_model
from nestforge.exporters.families.mhe.model import turned
from nestforge.exporters.source import open_source
from safetensors import safe_open
from support.tiny_compile import assert_tensorrt_takes, board
from support.tiny_mhe import FAR, encoder_config, save_tiny_mhe, tiny_mhe

FORMS = {
    "mhe_add": ("normal", "shared_scores", "one_exponential", "expanded_queries", "expanded", "literal"),
    "mhe_mul": ("normal", "expanded_queries", "expanded", "literal"),
}
EVERY = [(kind, None) for kind in ("mha", "sha", "mqa", "skv")] + [
    (k, form) for k, forms in FORMS.items() for form in forms
]
WHOLE, NARROW = "ffn48-head_width8", "ffn24-head_width3"
LEVELS = {"ffn": (1.0,), "head_width": (1.0,)}


def compiled(folder: Path, kind: str, form: str | None, **overrides: Any) -> Bundle:
    settings = {"attention": kind, "num_hidden_layers": 1, "attention_bias": True, "layout": "width_first"}
    save_tiny_mhe(folder / "m", far=FAR, **{**settings, **overrides})
    # Ranges of every form are proven with heads that have their whole width (test_compile.py).
    bucket = "1..2x1..8" if form in (None, "normal") else "2x8"
    profile = board(budgets={"full": {}}, buckets=[bucket], variants={"attention": form} if form else {})
    return open_bundle(compile_bundle(folder / "m", profile, folder / "b", submodels=[NARROW], levels=LEVELS))


@pytest.mark.parametrize(("kind", "form"), EVERY)
def test_every_kind_in_every_form_slices(tmp_path: Path, kind: str, form: str | None) -> None:
    bundle = compiled(tmp_path, kind, form)
    assert {engine.submodel for engine in bundle.manifest.engines} == {WHOLE, NARROW}
    for engine in bundle.manifest.engines:
        assert (engine.variants, engine.emitted, engine.slice_problem) == (form and {"attention": form}, "sliced", None)
        assert engine.parity is not None
        assert engine.private_bytes < 512, "no table of heads outside the store"
    assert [(proof.suite, proof.subject) for proof in bundle.manifest.proofs] == [("slice", NARROW)]
    assert_tensorrt_takes(bundle.path)


def test_numbers_are_ranked_and_their_order_is_found_again(tmp_path: Path) -> None:
    """A model whose heads are in front is turned; ranking keeps the numbers of all heads that weigh most."""
    model = tiny_mhe(encoder_config(attention="mhe_mul", num_hidden_layers=1))
    model.layers[0].attention.value.weight[5:] *= 20
    other = turned(model)
    save_model(other, other.config, tmp_path / "m")
    spec = open_source(tmp_path / "m").spec
    assert ([axis.name for axis in spec.axes], spec.trained_nested) == (["layers.0.ffn", "layers.0.head_width"], False)
    options: dict[str, Any] = {"submodels": ["ffn48-head_width3"], "levels": LEVELS}
    profile = board(budgets={"full": {}}, buckets=["2x8"])
    bundle = open_bundle(compile_bundle(tmp_path / "m", profile, tmp_path / "b", **options))
    assert bundle.manifest.ranking.order_file is not None
    with safe_open(bundle.file(bundle.manifest.ranking.order_file), framework="numpy") as order:
        assert sorted(order.get_tensor("layers.0.head_width")[:3].tolist()) == [5, 6, 7]
    assert verify_bundle(bundle.path, against=tmp_path / "m")
    ids, mask = torch.randint(0, 40, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
    with nestforge.load(bundle.path) as loaded:
        found = loaded({"input_ids": ids.numpy(), "attention_mask": mask.numpy()}, submodel="ffn48-head_width8")
    expected = model(ids, mask)
    torch.testing.assert_close(torch.from_numpy(found.outputs["last_hidden_state"]), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("precision", ["int8-dynamic", "int4"])
def test_narrow_heads_in_integers(tmp_path: Path, precision: str) -> None:
    folder = save_tiny_mhe(tmp_path / "m", attention="mhe_mul", num_hidden_layers=1, layout="width_first")
    profile = board(budgets={"full": {}}, buckets=["2x8"], precision=precision, variants={"attention": "normal"})
    bundle = open_bundle(compile_bundle(folder, profile, tmp_path / "b", submodels=[NARROW], levels=LEVELS))
    for engine in bundle.manifest.engines:
        assert (engine.precision, engine.emitted) == (precision, "sliced")


def test_what_a_plan_counts_of_narrow_heads(tmp_path: Path) -> None:
    """Half of every head: half of all that attention has, but for the biases of its output."""
    source = open_source(save_tiny_mhe(tmp_path / "m", attention="mha", layout="width_first"))
    whole, half = source.spec.universal(), source.spec.parse("ffn48-head_width4")
    of_attention = [sum(source.named_groups(submodel).values()) for submodel in (whole, half)]
    assert of_attention == [2 * 4 * 32 * 32, 4 * 32 * 32]
    flops = [
        sum(op.flops for op in source.workload(submodel, Bucket(1, 8)) if "attention.scores" in op.name)
        for submodel in (whole, half)
    ]
    assert flops[0] == 2 * flops[1] > 0
