"""A decoder whose heads share keys and values, with KV-cache engines: two vectors for each token and layer."""

from collections import Counter

import nestforge
import onnx
import pytest
import torch
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.exporters.families.mhe.model import Recorded, SourceEncoder
from nestforge.exporters.family import load_model
from support.tiny_compile import board
from support.tiny_mhe import pair_config, save_tiny_mhe, tiny_mhe

WHOLE, NARROW = "ffn48-heads4", "ffn48-heads3"


@pytest.fixture(scope="module", params=["mhe_add", "mhe_mul"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("mhe")
    model = save_tiny_mhe(folder / "m", decoder=True, attention=request.param, num_hidden_layers=1, nested=True)
    profile = board(budgets={"full": {}}, buckets=["1x8"])
    path = nestforge.compile(
        model,
        profile,
        folder / "b",
        generate=True,
        measure=False,
        submodels=[NARROW],
        levels={"ffn": (1.0,), "heads": (1.0,)},
    )
    return open_bundle(path)


def test_a_cache_has_one_head_whatever_the_heads_of_a_submodel(bundle: Bundle) -> None:
    entry = bundle.manifest.generation
    assert [(layer.heads, layer.size) for layer in entry.layers] == [(1, 8)]
    assert {engine.submodel for engine in entry.engines} == {WHOLE, NARROW}
    for engine in entry.engines:
        assert engine.parity is not None
        graph = onnx.load(bundle.file(engine.file), load_external_data=False).graph
        nodes = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
        found = [{attribute.name: attribute.i for attribute in node.attribute} for node in nodes]
        heads = 4 if engine.submodel == WHOLE else 3
        assert [(one["num_heads"], one["kv_num_heads"]) for one in found] == [(heads, 1)]
        assert Counter(node.op_type for node in graph.node)["Transpose"] == 0
        assert engine.private_bytes < 1000
        read = {tensor.name.partition(".attention.")[2] for tensor in graph.initializer}
        assert "embedding.key" not in read


def test_text_is_what_the_model_writes(bundle: Bundle) -> None:
    """Greedily, against passes of the module over everything so far."""
    model, prompt = load_model(bundle.path.with_name("m")), [3, 1, 4, 1, 5]
    ids = list(prompt)
    for _ in range(8):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    with nestforge.load(bundle.path) as served:
        written = served.generate(prompt, max_tokens=8, submodel=WHOLE).rows[0]
        assert list(written.tokens) == ids[len(prompt) :]
        assert len(served.generate(prompt, max_tokens=8, submodel=NARROW).rows[0].tokens) == 8


def test_fewer_heads_draft_on_the_same_cache(bundle: Bundle) -> None:
    """Submodels that keep fewer heads keep the same keys, and so one cache serves them all."""
    with nestforge.load(bundle.path) as served:
        plain = served.generate([3, 1, 4], max_tokens=9, submodel=WHOLE).rows[0]
        drafted = served.generate([3, 1, 4], max_tokens=9, submodel=WHOLE, draft=NARROW, drafted=3).rows[0]
    assert drafted.tokens == plain.tokens
    assert [(each.draft, each.drafted > 0) for each in drafted.drafts] == [(NARROW, True)]


READ = torch.randint(0, 40, (1, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("attention", "heads"),
    [("mha", 4), ("sha", 1), ("mqa", 1), ("skv", 4), ("el_att", 4), ("mhe_add", 1), ("mhe_mul", 1)],
)
def test_a_prompt_is_two_vectors_of_a_token_and_layer_where_heads_share_them(attention: str, heads: int) -> None:
    model = tiny_mhe(pair_config(attention=attention, num_decoder_layers=2))
    found = SourceEncoder(model)(READ)
    assert [tuple(one.shape) for one in found] == [(1, heads, 8, 6), (1, heads, 6, 8)] * 2
    if attention == "mhe_mul":
        read, cross = model.encode(READ, None), model.decoder.layers[1].cross_attention
        torch.testing.assert_close(found[2][0, 0], cross.key.weight @ read[0].T)
        torch.testing.assert_close(found[3][0, 0], cross.value(read)[0])


def test_what_is_recorded_is_the_models_own_pass() -> None:
    model, written = tiny_mhe(pair_config()).double(), torch.tensor([[1, 5, 9]])
    logits, key, value = Recorded(model)(written, READ)
    assert torch.equal(logits, model(READ, torch.ones_like(READ), written))
    own = model.decoder.layers[0].attention
    torch.testing.assert_close(key[:, 0], own.key(model.embeddings(written)))
    torch.testing.assert_close(value[:, 0], own.value(model.embeddings(written)))
