"""A MatLM whose heads are elastic, with KV-cache engines of as many heads as each submodel has."""

from __future__ import annotations

import nestforge
import onnx
import pytest
import torch
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.exporters.family import load_model
from support.tiny_compile import board
from support.tiny_matlm import save_tiny_matlm

WHOLE, NARROW = "ffn32-heads4", "ffn16-heads3"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """With a relative bias, which has a row for each head; rotary positions are those of the golden bundle."""
    folder = tmp_path_factory.mktemp("matlm")
    options = {"position": "relative_bias", "num_hidden_layers": 1, "intermediate_size": 32}
    model = save_tiny_matlm(folder / "m", nested_heads=True, **options)
    profile = board(budgets={"full": {}}, buckets=["1x8"])
    submodels, levels = [NARROW], {"ffn": (1.0,), "heads": (1.0,)}
    path = nestforge.compile(
        model, profile, folder / "b", generate=True, measure=False, submodels=submodels, levels=levels
    )
    return open_bundle(path)


def test_one_trace_gives_the_engines_of_all_numbers_of_heads(bundle: Bundle) -> None:
    entry = bundle.manifest.generation
    assert entry is not None
    found = {engine.submodel: (engine.emitted, engine.kind.cache_heads) for engine in entry.engines}
    assert found == {WHOLE: ("sliced", None), NARROW: ("sliced", (3,))}
    for engine in entry.engines:
        heads = 4 if engine.submodel == WHOLE else 3
        graph = onnx.load(bundle.file(engine.file), load_external_data=False).graph
        (node,) = (node for node in graph.node if node.op_type == "GroupQueryAttention")
        numbers = {attribute.name: attribute.i for attribute in node.attribute}
        assert (numbers["num_heads"], numbers["kv_num_heads"]) == (heads, heads)
        caches = [tensor for tensor in (*graph.input, *graph.output) if tensor.name.startswith(("past", "present"))]
        assert [tensor.type.tensor_type.shape.dim[1].dim_value for tensor in caches] == [heads] * 4


@pytest.mark.parametrize(("submodel", "ffn", "heads"), [(WHOLE, 32, 4), (NARROW, 16, 3)])
def test_text_is_what_the_module_writes(bundle: Bundle, submodel: str, ffn: int, heads: int) -> None:
    """Greedily, against passes of the module, with the rest at zero, over everything so far; several rows as one."""
    model, prompts = load_model(bundle.path.with_name("m")), [[3, 1, 4, 1, 5], [7, 8]]
    model.get_parameter("layers.0.ffn.down.weight").data[:, ffn:] = 0
    model.get_parameter("layers.0.attention.output.weight").data[:, 8 * heads :] = 0
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(16):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    with nestforge.load(bundle.path) as served:
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert list(served.generate(prompt, max_tokens=16, submodel=submodel).rows[0].tokens) == tokens
        rows = served.generate(prompts, max_tokens=16, submodel=submodel).rows
        assert [list(row.tokens) for row in rows] == expected


def test_verify_runs_every_number_of_heads_again(bundle: Bundle) -> None:
    report = nestforge.verify(bundle.path, bundle.path.with_name("m"))
    assert report
    assert {verdict.engine for verdict in report.engines} >= {f"{one}.cached@b1_64-s1_48" for one in (WHOLE, NARROW)}
