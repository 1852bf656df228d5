"""Submodels that keep other heads, or narrower ones: each has a cache, and a reading of the prompt, of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import onnx
import pytest
import torch
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.planning.levels import levels as levels_of
from nestforge.errors import PlanError, SelectionError
from nestforge.exporters.family import load_model
from nestforge.exporters.source import open_source
from support.tiny_compile import board
from support.tiny_mhe import save_tiny_mhe, save_tiny_pair

WIDE: dict[str, Any] = {"layout": "width_first", "head_dim": 16, "num_hidden_layers": 1, "nested": True}


def compiled(folder: Path, submodels: list[str]) -> Bundle:
    """The bundle ``b`` of the model ``m``, with its universal submodel and these."""
    kinds = open_source(folder / "m").spec.kinds
    device = board(budgets={"full": {}}, buckets=["1x8"])
    options: dict[str, Any] = {"submodels": submodels, "levels": dict.fromkeys(kinds, (1.0,)), "generate": True}
    return open_bundle(compile_bundle(folder / "m", device, folder / "b", **options))


@pytest.fixture(scope="module", params=["mha", "mhe_mul"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("wide")
    save_tiny_mhe(folder / "m", decoder=True, attention=request.param, **WIDE)
    return compiled(folder, ["ffn48-head_width8", "ffn24-head_width8"])


def test_a_cache_of_narrow_heads_is_narrow(decoder: Bundle) -> None:
    entry = decoder.manifest.generation
    assert entry is not None
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
    bundle = compiled(tmp_path, ["ffn48-heads4x1_3x1-cross_heads2"])
    entry = bundle.manifest.generation
    assert entry is not None
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
        compiled(tmp_path, ["ffn24-head_width12"])
    assert not (tmp_path / "b").exists()
