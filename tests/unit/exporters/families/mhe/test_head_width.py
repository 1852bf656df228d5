"""The width of heads as an axis, and submodels that keep other heads: engines, caches and readings of their own."""

from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import onnx
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.planning.levels import levels as levels_of
from nestforge.compiler.verify import verify_bundle
from nestforge.errors import PlanError, SelectionError
from nestforge.exporters.checkpoints.own_folder import save_model
from nestforge.exporters.families.mhe.model import turned
from nestforge.exporters.family import load_model
from nestforge.exporters.source import open_source
from safetensors import safe_open
from support.tiny_compile import assert_tensorrt_takes, board
from support.tiny_mhe import FAR, encoder_config, save_tiny_mhe, save_tiny_pair, tiny_mhe

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


WIDE: dict[str, Any] = {"layout": "width_first", "head_dim": 16, "num_hidden_layers": 1, "nested": True}


def compiled_to_generate(folder: Path, submodels: list[str]) -> Bundle:
    """The bundle ``b`` of the model ``m``, with its universal submodel and these."""
    kinds = open_source(folder / "m").spec.kinds
    device = board(budgets={"full": {}}, buckets=["1x8"])
    options: dict[str, Any] = {"submodels": submodels, "levels": dict.fromkeys(kinds, (1.0,)), "generate": True}
    return open_bundle(compile_bundle(folder / "m", device, folder / "b", **options))


@pytest.fixture(scope="module", params=["mha", "mhe_mul"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("wide")
    save_tiny_mhe(folder / "m", decoder=True, attention=request.param, **WIDE)
    return compiled_to_generate(folder, ["ffn48-head_width8", "ffn24-head_width8"])


def test_a_cache_of_narrow_heads_is_narrow(decoder: Bundle) -> None:
    entry = decoder.manifest.generation
    for engine in entry.engines:
        size = 16 if engine.submodel == "ffn48-head_width16" else 8
        assert (engine.emitted, engine.kind.cache_heads, engine.kind.cache_sizes) == (
            "sliced",
            None,
            None if size == 16 else (8,),
        )
        assert [layer.size for layer in entry.of(engine).layers] == [size]
        graph = onnx.load(decoder.file(engine.file), load_external_data=False).graph
        places = {
            value.name: value.type.tensor_type.shape.dim[3].dim_value for value in graph.input if "past" in value.name
        }
        assert places == {"past_key_0": size, "past_value_0": size}


def test_it_writes_what_the_model_writes_and_a_session_starts_anew_for_another_size(decoder: Bundle) -> None:
    """Submodels of one size continue each other's cache."""
    model, prompt = load_model(decoder.path.with_name("m")), [3, 1, 4, 1, 5]
    ids = list(prompt)
    for _ in range(6):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    with nestforge.load(decoder.path) as served, served.session(capacity=24) as session:
        for submodel, reused in (
            ("ffn48-head_width16", 0),
            ("ffn48-head_width8", 0),
            ("ffn24-head_width8", 0),
            ("ffn48-head_width16", 0),
            ("ffn48-head_width16", 4),
        ):
            row = served.generate(prompt, max_tokens=6, stop=[], submodel=submodel, session=session).rows[0]
            assert row.reused_tokens == reused, submodel
            if submodel == "ffn48-head_width16":
                assert list(row.tokens) == ids[len(prompt) :]
            else:
                alone = served.generate(prompt, max_tokens=6, stop=[], submodel=submodel).rows[0]
                assert alone.tokens == row.tokens
        with pytest.raises(SelectionError, match=r"heads of its size, and no layer with more, or it could not read"):
            served.generate(prompt, max_tokens=4, submodel="ffn48-head_width16", draft="ffn24-head_width8")
        drafted = served.generate(
            prompt, max_tokens=6, stop=[], submodel="ffn48-head_width8", draft="ffn24-head_width8"
        )
        assert drafted.rows[0].drafts


def test_a_rate_leaves_out_submodels_of_another_size_once_one_has_written(decoder: Bundle) -> None:
    with nestforge.load(decoder.path) as served:
        row = served.generate([3, 1, 4], max_tokens=4, stop=[], tokens_per_second=1e9).rows[0]
    assert {run.submodel for run in row.runs} == {"ffn48-head_width16"}
    assert "2 with heads that earlier tokens lack, or of another size, cannot continue" in row.runs[-1].reason


@pytest.mark.parametrize("kind", ["mha", "skv"])
def test_a_translation_model_keeps_other_heads_of_its_own_text_than_of_the_prompt(tmp_path: Path, kind: str) -> None:
    save_tiny_pair(tmp_path / "m", attention=kind, nested=True)
    bundle = compiled_to_generate(tmp_path, ["ffn48-heads4x1_3x1-cross_heads2"])
    entry = bundle.manifest.generation
    assert {(engine.segment, engine.emitted, *engine.cache_layout) for engine in entry.every_engine} == {
        ("cached", "sliced", (3,), None, (2,), None),
        ("encoder", "sliced", None, None, (2,), None),
        ("cached", "sliced", None, None, None, None),
        ("encoder", "sliced", None, None, None, None),
    }
    model, prompts = load_model(tmp_path / "m"), [[3, 1, 4, 1, 5, 9, 2], [6]]
    with nestforge.load(bundle.path) as served:
        answer = served.generate(prompts, max_tokens=6, stop=[], submodel="ffn48-heads4-cross_heads4")
        for prompt, row in zip(prompts, answer.rows, strict=True):
            read = torch.tensor([prompt])
            logits = model(read, torch.ones_like(read), torch.tensor([[1, *row.tokens[:-1]]]))[0]
            taken = logits.gather(1, torch.tensor(row.tokens)[:, None])[:, 0]
            assert (logits.amax(1) - taken < 1e-4).all()
        small = "ffn48-heads4x1_3x1-cross_heads2"
        together = served.generate(prompts, max_tokens=6, stop=[], submodel=small)
        alone = [served.generate([prompt], max_tokens=6, stop=[], submodel=small).rows[0] for prompt in prompts]
        assert [row.tokens for row in together.rows] == [row.tokens for row in alone]
        plain = served.generate([prompts[0]], max_tokens=6, stop=[], submodel="ffn48-heads4-cross_heads4").rows[0]
        drafted = served.generate(
            [prompts[0]], max_tokens=6, stop=[], submodel="ffn48-heads4-cross_heads4", draft=small, drafted=3
        ).rows[0]
        np.testing.assert_array_equal(drafted.tokens, plain.tokens)
        assert drafted.drafts[0].drafted > 0, "the first heads of both"


def test_widths_that_no_cache_has_are_refused_and_levels_avoid_them(tmp_path: Path) -> None:
    folder = save_tiny_mhe(tmp_path / "m", decoder=True, attention="mqa", **WIDE)
    found = levels_of(open_source(folder).spec, {"ffn": (0.5, 1.0), "head_width": (0.6, 1.0)}, 8)
    assert found[0].submodel.id == "ffn24-head_width8"
    assert found[0].rounding == ("50%: head_width 9.6 of 16 rounded to 8 (a multiple of 8)",)
    with pytest.raises(PlanError, match="generate: submodel ffn24-head_width12 cannot: heads of size 12; expected a"):
        compiled_to_generate(tmp_path, ["ffn24-head_width12"])
    assert not (tmp_path / "b").exists()
