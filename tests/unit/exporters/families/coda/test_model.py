"""A layer against the equations of the paper, written again with the one-hot matrix P and loops over heads."""

from typing import Any

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.errors import InputError, ParityError, PlanError
from nestforge.exporters.families.coda.attention import LowRank, Places, RelativeBias
from nestforge.exporters.families.coda.config import ImageInput
from nestforge.exporters.families.coda.family import TokenRoutes
from nestforge.exporters.families.coda.model import (
    CodaEncoder,
    ImageEmbeddings,
    Layer,
    TextEmbeddings,
    lower,
    make_embeddings,
    replay,
)
from nestforge.exporters.families.coda.ops import elastic_spec
from nestforge.exporters.families.coda.routing import soft_top_k
from nestforge.exporters.modules.layers import Answering
from support.tiny_coda import OF_IMAGES, SCHEDULE, coda_config, tiny_coda

SETTINGS: dict[str, dict[str, Any]] = {
    "relative, to all": {},
    "relative, to selected": {"keys_of": "selected"},
    "rotary, to all": {"position": "rotary"},
    "rotary, to selected": {"position": "rotary", "keys_of": "selected", "num_key_value_heads": 1},
    "learned": {"position": "learned", "norm": "layer", "bias": True},
    "sigmoid": {"router": "sigmoid", "keys_of": "selected"},
    "first k": {"router": "first_k"},
    "a dense layer before": {"conditional_layers": (1,)},
}


def model_of(reduction: int = 2, **settings: Any) -> CodaEncoder:
    model = tiny_coda(coda_config(**settings)).double()
    model.reduction = reduction
    return model


def inputs(rows: int = 3, tokens: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and a mask whose first row has three tokens of padding, its second all but two."""
    torch.manual_seed(1)
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    mask[0, tokens - 3 :] = 0
    mask[1, 2:] = 0
    return torch.randint(0, 40, (rows, tokens)), mask


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_rows_are_answered_alike_alone_and_together(settings: dict[str, Any]) -> None:
    model, (ids, mask) = model_of(**settings), inputs()
    together = model(ids, mask)
    for row in range(3):
        alone = model(ids[row : row + 1], mask[row : row + 1])
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_what_padding_holds_reaches_no_token(settings: dict[str, Any]) -> None:
    model, (ids, mask) = model_of(**settings), inputs()
    expected, other = model(ids, mask), model(torch.where(mask > 0, ids, (ids + 7) % 40), mask)
    torch.testing.assert_close(other[mask > 0], expected[mask > 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_row_of_padding_gives_no_nan(settings: dict[str, Any]) -> None:
    model, (ids, mask) = model_of(**settings).float(), inputs()
    expected = model(ids, mask)
    mask[1] = 0
    found = model(ids, mask)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], rtol=0, atol=1e-5)


def test_k_follows_the_padded_length() -> None:
    """The same text in a longer bucket is answered by another k, and so otherwise: as the model does at that length."""
    model, ids = model_of(), inputs()[0][:1]
    mask = torch.ones_like(ids)
    short = model(ids, mask)
    padded = [torch.nn.functional.pad(tensor, (0, 12)) for tensor in (ids, mask)]
    long, found = model.routed(*padded)
    assert (model.counts(12), model.counts(24)) == ({0: 6, 1: 6}, {0: 12, 1: 12})
    assert {tuple(selection.chosen.shape) for selection in found.values()} == {(1, 12)}
    assert float((long[:, :12] - short).abs().max()) > 1e-3


def test_every_token_passes_at_one_where_the_checkpoint_says_so() -> None:
    routed, dense = model_of(1), model_of(1, reduction_of_one="dense")
    ids, mask = inputs()
    assert (routed.counts(12), dense.counts(12)) == ({0: 12, 1: 12}, {})
    assert routed.routed(ids, mask)[1].keys() == {0, 1}
    assert dense.routed(ids, mask)[1] == {}
    assert float((routed(ids, mask) - dense(ids, mask)).abs().max()) > 1e-3, "gates below 1"


def test_classes_are_of_the_mean_of_the_tokens() -> None:
    model, (ids, mask) = model_of(num_labels=3), inputs()
    classifier, logits = model.classifier, model(ids, mask)
    model.classifier = None
    states = model(ids, mask)
    for row in range(3):
        torch.testing.assert_close(logits[row], classifier(states[row][mask[row] > 0].mean(0)))


def test_places_of_selected_tokens_are_their_own() -> None:
    """Where all tokens are selected, in whatever order, the answer is that of tokens in order."""
    for position in ("relative", "rotary"):
        for keys_of in ("selected", "all"):
            model, (ids, mask) = model_of(1, position=position, keys_of=keys_of, router="sigmoid"), inputs()
            expected, found = model.routed(ids, mask)
            given = {layer: torch.arange(12).expand(3, 12) for layer in found}
            torch.testing.assert_close(model.routed(ids, mask, given=given)[0], expected, rtol=0, atol=1e-12)


def test_refuses_what_it_cannot_answer() -> None:
    ids = torch.zeros(1, 25, dtype=torch.int64)
    with pytest.raises(InputError, match=r"^25 tokens: the model takes at most 24$"):
        model_of()(ids, ids + 1)
    with pytest.raises(PlanError, match=r"^coda\.reduction 4: expected 1 to 3, the tokens of a row$"):
        model_of(4)(ids[:, :3], ids[:, :3] + 1)


TOKENS = 6


def drawn(**settings: Any) -> tuple[Layer, torch.Tensor, Places]:
    """A layer in float64, its input, and places of which row 1 has two of padding."""
    torch.manual_seed(0)
    layer = Layer(coda_config(**settings), conditional=True).double()
    for name, parameter in layer.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + name.endswith("norm.weight")
    mask = torch.ones(2, TOKENS)
    mask[1, 4:] = 0
    relative = RelativeBias(4).double()
    relative.weight.data.normal_()
    x = torch.randn(2, TOKENS, 32).double()
    return layer.requires_grad_(False), x, Places.of(mask, x, relative.requires_grad_(False), None)


def norm_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def attended(
    layer: Layer, asking: torch.Tensor, read: torch.Tensor, bias: torch.Tensor, hidden_keys: torch.Tensor
) -> torch.Tensor:
    """One row, head by head: ``asking`` [q, d] and ``read`` [m, d], ``bias`` [A, q, m], ``hidden_keys`` [m]."""
    parts, size, config = layer.attention, 8, layer.config
    query, key, value = (part.weight for part in (parts.query, parts.key, parts.value))
    heads = []
    for head in range(4):
        shared = head // (4 // config.key_value_heads)
        own, theirs = slice(head * size, head * size + size), slice(shared * size, shared * size + size)
        scores = (asking @ query[own].T) @ (read @ key[theirs].T).T / size**0.5 + bias[head]
        scores[:, hidden_keys] = -1e300
        heads.append(scores.softmax(-1) @ (read @ value[theirs].T))
    return torch.cat(heads, -1) @ parts.output.weight.T


@pytest.mark.parametrize("keys_of", ["selected", "all"])
@pytest.mark.parametrize("ffn_residual", ["raw", "normed"])
@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_the_equations(keys_of: str, ffn_residual: str, key_value_heads: int) -> None:
    layer, x, places = drawn(keys_of=keys_of, ffn_residual=ffn_residual, num_key_value_heads=key_value_heads)
    found, selection = layer(x, places, 3)
    assert selection is not None
    for row in range(2):
        normed = norm_of(x[row], layer.attention_norm.weight)
        scores = torch.where(places.is_token[row], normed @ layer.router.weight, -1e9)
        gates = soft_top_k(scores, 3, SCHEDULE, layer.router.temperatures) * places.is_token[row]
        matrix = torch.nn.functional.one_hot(scores.topk(3).indices, TOKENS).double()  # P [k, n]
        routed = matrix @ normed  # (3)
        bias, hidden = matrix @ places.bias, ~places.is_token[row]
        read = normed
        if keys_of == "selected":
            read, bias, hidden = routed, bias @ matrix.T, matrix @ hidden.double() > 0
        attention = attended(layer, routed, read, bias, hidden)  # (4)
        residual = matrix @ x[row] if ffn_residual == "raw" else routed
        ffn = (norm_of(residual + attention, layer.ffn_norm.weight) @ layer.ffn.up.weight.T).relu()
        conditional = matrix.T @ (attention + ffn @ layer.ffn.down.weight.T)  # (6)
        adapter = (normed @ layer.adapter.down.weight.T + layer.adapter.down.bias).relu()
        adapter = adapter @ layer.adapter.up.weight.T + layer.adapter.up.bias  # (1)
        chosen = (gates * matrix.sum(0))[:, None]
        torch.testing.assert_close(found[row], x[row] + adapter + chosen * conditional, rtol=0, atol=1e-12)  # (7)


@pytest.mark.parametrize("keys_of", ["selected", "all"])
def test_where_norms_come_last_the_dense_layer_less_the_rows_is_added(keys_of: str) -> None:
    layer, x, places = drawn(keys_of=keys_of, norm_place="after")
    found, selection = layer(x, places, 3)
    assert selection is not None
    for row in range(2):
        scores = torch.where(places.is_token[row], x[row] @ layer.router.weight, -1e9)
        gates = soft_top_k(scores, 3, SCHEDULE, layer.router.temperatures) * places.is_token[row]
        matrix = torch.nn.functional.one_hot(scores.topk(3).indices, TOKENS).double()  # P [k, n]
        rows, bias, hidden = matrix @ x[row], matrix @ places.bias, ~places.is_token[row]
        read = x[row]
        if keys_of == "selected":
            read, bias, hidden = rows, bias @ matrix.T, matrix @ hidden.double() > 0
        middle = norm_of(rows + attended(layer, rows, read, bias, hidden), layer.attention_norm.weight)
        ffn = (middle @ layer.ffn.up.weight.T).relu() @ layer.ffn.down.weight.T
        dense = norm_of(middle + ffn, layer.ffn_norm.weight)
        adapter = layer.adapter(x[row])
        added = (gates * matrix.sum(0))[:, None] * (matrix.T @ (dense - rows))
        torch.testing.assert_close(found[row], x[row] + adapter + added, rtol=0, atol=1e-12)


@pytest.mark.parametrize("keys_of", ["selected", "all"])
def test_low_rank_terms_are_matrices_added_to_queries_and_values(keys_of: str) -> None:
    """LoRA (arXiv 2106.09685, equation 3) merged into frozen matrices; tokens that are left out pass as they are."""
    layer, x, places = drawn(keys_of=keys_of, adapter="lora", adapter_scale=0.5, num_key_value_heads=2)
    found, selection = layer(x, places, 3)
    terms = layer.adapter
    assert isinstance(terms, LowRank)
    merged, _, _ = drawn(keys_of=keys_of, num_key_value_heads=2)
    frozen = {name: tensor for name, tensor in layer.state_dict().items() if "adapter" not in name}
    merged.load_state_dict({**merged.state_dict(), **frozen})
    merged.adapter.up.weight.zero_(), merged.adapter.up.bias.zero_()
    for part in ("query", "value"):
        term = getattr(terms, part)
        getattr(merged.attention, part).weight += 0.5 * term.up.weight @ term.down.weight
    expected, chosen = merged(x, places, 3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    left_out = torch.ones(2, TOKENS, dtype=torch.bool).scatter(1, selection.chosen, False)
    assert torch.equal(found[left_out], x[left_out])
    assert torch.equal(chosen.chosen, selection.chosen)


def test_a_sequential_adapter_reads_what_the_layer_made_of_every_token() -> None:
    layer, x, places = drawn(adapter="sequential")
    with_adapter, selection = layer(x, places, 3)
    up = layer.adapter.up.weight.clone(), layer.adapter.up.bias.clone()
    layer.adapter.up.weight.zero_(), layer.adapter.up.bias.zero_()
    bare, _ = layer(x, places, 3)
    inner = (bare @ layer.adapter.down.weight.T + layer.adapter.down.bias).relu()
    torch.testing.assert_close(with_adapter, bare + inner @ up[0].T + up[1], rtol=0, atol=1e-12)
    left_out = torch.ones(2, TOKENS, dtype=torch.bool).scatter(1, selection.chosen, False)
    assert torch.equal(bare[left_out], x[left_out])
    assert float((with_adapter - bare)[left_out].abs().max()) > 1e-3, "also of tokens that are left out"


@pytest.mark.parametrize("keys_of", ["selected", "all"])
def test_all_tokens_at_a_gate_of_one_without_an_adapter_are_the_dense_layer(keys_of: str) -> None:
    """With the raw residual; the normalised one is another layer."""
    for ffn_residual, equal in (("raw", True), ("normed", False)):
        layer, x, places = drawn(keys_of=keys_of, ffn_residual=ffn_residual, router="first_k")
        layer.adapter.up.weight.zero_(), layer.adapter.up.bias.zero_()
        dense, selection = layer(x, places, None)
        assert selection is None
        normed = layer.attention_norm(x)
        attention = x + layer.attention(normed, normed, places.added(), None, None)
        torch.testing.assert_close(dense, attention + layer.ffn(layer.ffn_norm(attention)), rtol=0, atol=1e-12)
        conditional, _ = layer(x, places, TOKENS)
        gap = float((conditional - dense)[places.is_token].abs().max())
        assert gap < 1e-12 if equal else gap > 1e-3


def test_activations_gates_and_scales_of_the_adapter_and_the_ffn() -> None:
    layer, x, _ = drawn(activation="gelu_tanh", gated_ffn=True, adapter_activation="gelu", adapter_scale=0.5)
    ffn, gelu = layer.ffn, torch.nn.functional.gelu
    inner = gelu(x @ ffn.gate.weight.T, approximate="tanh") * (x @ ffn.up.weight.T)
    torch.testing.assert_close(ffn(x), inner @ ffn.down.weight.T)
    adapter = layer.adapter
    torch.testing.assert_close(adapter(x), 0.5 * adapter.up(gelu(adapter.down(x))))


IDS = torch.tensor([[3, 1, 2], [5, 0, 9]])


def test_words_kinds_and_places_are_added_and_normed_where_norms_come_last() -> None:
    made = tiny_coda(coda_config(position="learned", type_vocab_size=2, norm_place="after", norm="layer")).embeddings
    assert isinstance(made, TextEmbeddings)
    kinds = torch.tensor([[0, 1, 1], [1, 0, 0]])
    found = made(IDS, kinds)
    for row in range(2):
        for place in range(3):
            summed = made.word.weight[IDS[row, place]] + made.token_type.weight[kinds[row, place]]
            expected = made.norm(summed + made.position.weight[place])
            torch.testing.assert_close(found[row, place], expected)


def test_one_kind_of_token_is_every_token_s() -> None:
    config = coda_config(type_vocab_size=1)
    made = make_embeddings(config)
    assert config.inputs == ("input_ids", "attention_mask")
    assert isinstance(made, TextEmbeddings)
    torch.testing.assert_close(made(IDS), made.word(IDS) + made.token_type.weight[0])


def test_patches_are_products_row_by_row_behind_the_front_token() -> None:
    made = tiny_coda(coda_config(**OF_IMAGES, position="learned")).embeddings
    assert isinstance(made, ImageEmbeddings)
    pixels = torch.randn(2, 2, 8, 12)
    found = made(pixels) - made.position.weight
    assert found.shape == (2, 7, 32)
    torch.testing.assert_close(found[:, 0], made.front.expand(2, -1), rtol=0, atol=1e-5)
    for row in range(2):
        for across in range(3):
            patch = pixels[:, :, 4 * row : 4 * row + 4, 4 * across : 4 * across + 4]
            expected = patch.flatten(1) @ made.patch.weight.flatten(1).T + made.patch.bias
            torch.testing.assert_close(found[:, 1 + 3 * row + across], expected, rtol=0, atol=1e-4)


def test_pixels_that_fill_no_patch_are_left_out() -> None:
    image = ImageInput(channels=2, height=11, width=9, patch_height=4, patch_width=4, front_tokens=0)
    made = tiny_coda(coda_config(**{**OF_IMAGES, "image": image})).embeddings
    pixels = torch.randn(1, 2, 11, 9)
    found = made(pixels)
    assert found.shape == (1, image.tokens, 32) == (1, 4, 32)
    pixels[:, :, 8:] = pixels[..., 8:] = 7
    assert torch.equal(made(pixels), found)


ROWS = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(ROWS)
MASK[0, 5:] = 0


@pytest.mark.parametrize("combine", ["scatter", "one_hot"])
def test_what_is_traced_answers_alike_and_returns_its_tokens(combine: str) -> None:
    module = Answering(tiny_coda(coda_config()))
    module.model.reduction = 2
    traced = lower(module, {"coda.dispatch": "gather", "coda.combine": combine})
    output, *routes = traced(ROWS, MASK)
    torch.testing.assert_close(output, module(ROWS, MASK)[0], rtol=0, atol=1e-5)
    assert [tuple(route.shape) for route in routes] == [(2, 4)] * 2
    own = {id(parameter) for parameter in module.parameters()}
    assert {id(parameter) for parameter in traced.parameters()} == own


INPUTS = (ROWS, torch.ones_like(ROWS))
MODEL = tiny_coda(coda_config()).double()
MODEL.reduction = 4
OUTPUT, OWN = MODEL.routed(*INPUTS)
ROUTES = {f"routes.{layer}": selection.chosen for layer, selection in OWN.items()}


def test_own_tokens_have_no_gap() -> None:
    found = replay(MODEL, INPUTS, ROUTES)
    assert torch.equal(found.outputs[0], OUTPUT)
    for name, judged in found.routes.items():
        assert (judged.score_gap, judged.made, judged.differing) == (0, 4, 0), name
        assert judged.shares.keys() == {"mean_gate", "gates_vanished"}


def test_another_token_is_judged_by_the_scores_and_named() -> None:
    last = OWN[0].ranked[1].sort(descending=True).indices[-1]
    given = {**ROUTES, "routes.0": ROUTES["routes.0"].clone()}
    given["routes.0"][1, 1] = last
    judged = replay(MODEL, INPUTS, given).routes["routes.0"]
    second = ROUTES["routes.0"][1, 1]
    gap = float(OWN[0].ranked[1, second] - OWN[0].ranked[1, last])
    assert judged.score_gap == pytest.approx(gap, rel=1e-12)
    assert judged.differing == 1
    assert judged.where.startswith(f"layer 0, row 1: took token {int(last)} (")
    assert f" before {int(second)} (" in judged.where


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "routes none: expected routes.0, routes.1"),
        ({**ROUTES, "routes.1": ROUTES["routes.1"][:, :1]}, r"routes.1: expected int64 \[2, 2\], got int64 \[2, 1\]"),
        ({**ROUTES, "routes.1": torch.tensor([[0, 8], [1, 2]])}, r"routes.1: expected 0..7, got 8 at \[0, 1\]"),
        ({**ROUTES, "routes.0": torch.tensor([[0, 1], [2, 2]])}, "routes.0: row 1: took token 2 twice"),
    ],
    ids=["none", "another k", "no such token", "twice"],
)
def test_what_no_router_can_select_is_refused(given: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ParityError, match=f"^{message}$"):
        replay(MODEL, INPUTS, given)


BUCKET = Bucket(2, 10)


def stated(reduction: int, **settings: Any) -> tuple[list[tuple[str, tuple[int, ...]]], dict[str, int | str]]:
    config = coda_config(**settings)
    routes, submodel = TokenRoutes(config), elastic_spec(config).submodel({"coda.reduction": reduction})
    entries = [(entry.name, entry.shape) for entry in routes.entries(submodel, BUCKET)]
    return entries, dict(routes.metadata(submodel, BUCKET))


def test_the_manifest_says_which_k() -> None:
    entries, metadata = stated(4)
    assert entries == [("routes.0", (2, 3)), ("routes.1", (2, 3))]
    assert metadata == {
        "reduction": 4,
        "tokens per row": 10,
        "tokens selected": 3,
        "router": "soft_top_k",
        "keys and values of": "all",
        "padding is routed": "no",
        "soft top-k": "3 rounds from epsilon 4 by 0.7 to 0.5, b from zero",
    }
    assert stated(4, conditional_layers=(1,))[0] == [("routes.1", (2, 3))]


def test_where_nothing_is_compared_nothing_is_returned() -> None:
    entries, metadata = stated(4, router="first_k")
    assert (entries, metadata["tokens selected"], metadata["router"]) == ([], 3, "first_k")
    entries, metadata = stated(1, reduction_of_one="dense")
    assert (entries, metadata["tokens selected"], metadata["router"]) == ([], 10, "none")
