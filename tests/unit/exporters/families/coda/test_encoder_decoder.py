"""Presets with a decoder: beside adapters and routers the published T5 v1.1."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.elastic import Axis, Submodel
from nestforge.errors import ExportError, ParityError
from nestforge.exporters.families.coda.encoder_decoder import (
    Answering,
    RecordedPass,
    SourceEncoder,
    load_model,
    lower,
)
from nestforge.exporters.families.coda.encoder_decoder_family import (
    PairRoutes,
    elastic_spec,
    encoding_ops,
    forward_ops,
    of_encoder,
    parameter_shapes,
)
from nestforge.exporters.families.t5 import step_ops
from nestforge.exporters.source import open_source
from nestforge.exporters.trace import trace
from support.tiny_coda import OF_IMAGES, encoder_config, pair_config, save_tiny_pair, tiny_pair

DRAW = torch.Generator().manual_seed(0)


def test_signature_and_how_it_generates(tmp_path: Path) -> None:
    folder = save_tiny_pair(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    source = open_source(folder)
    assert source.family.name == "coda_encoder_decoder"
    assert [spec.name for spec in source.signature.inputs] == ["input_ids", "attention_mask", "decoder_input_ids"]
    text, cached = source.signature.text, source.architecture.cached
    assert (text.mask, text.shifted, text.start) == ("attention_mask", "decoder_input_ids", 0)
    with pytest.raises(ExportError, match="one number for each length; ask for static buckets"):
        source.signature.buckets([Bucket(1, 8, None, 1)], [])
    assert (cached.encoder.start, cached.encoder.positions, cached.encoder.axes) == (0, 24, ("coda.reduction",))
    assert cached.problem is None


def test_another_k_holds_in_buckets_and_for_no_prompt(tmp_path: Path) -> None:
    folder = save_tiny_pair(tmp_path / "m", encoder=encoder_config(tokens_selected={"8": {"3": 2}}))
    source, model = open_source(folder), load_model(folder)
    reduced = source.spec.parse("ffn32-coda.reduction3")
    routes = {length: source.routes(reduced, Bucket(1, length))[0].shape for length in (8, 12)}
    assert routes == {8: (1, 2), 12: (1, 4)}
    model.encoder.reduction = 3
    assert (model.encoder.counts(8), model.encoder.counts(12)) == ({0: 2}, {0: 4})
    assert source.architecture.cached.problem == "tokens_selected says k of rows of some lengths, and a prompt has any"


@pytest.mark.parametrize(
    ("encoder", "changes", "problem"),
    [
        ({"reduction": 2}, {}, r"encoder: reductions: \[3, 1\] lack 2"),
        (OF_IMAGES, {}, "encoder: image: got .* before a decoder of T5; expected none"),
        ({"num_labels": 3}, {}, "encoder: num_labels: got 3 before a decoder of T5; expected none"),
        ({"norm": "layer"}, {}, "encoder: norm: got layer before a decoder of T5; expected rms"),
        ({}, {"decoder_start_token_id": 40}, "decoder_start_token_id: expected a token of the vocabulary, 0..39, got"),
        ({}, {"eos_token_id": (1, 50)}, "eos_token_id: expected a token of the vocabulary, 0..39, got 50"),
    ],
)
def test_what_makes_no_model(encoder: dict[str, Any], changes: dict[str, Any], problem: str) -> None:
    found = pair_config(encoder_config(**encoder), **changes).problem()
    assert found is not None
    assert re.match(problem, found)


def test_a_submodel_of_both_sides_names_one_of_the_encoder() -> None:
    axes = (Axis("encoder.layers.0.ffn", 8), Axis("decoder.layers.0.ffn", 8), Axis("coda.reduction", 1, (3, 1)))
    found = of_encoder(Submodel(tuple(zip(axes, (4, 8, 3), strict=True))))
    assert [(axis.name, value) for axis, value in found.values] == [("layers.0.ffn", 4), ("coda.reduction", 3)]


def test_shapes_are_those_of_the_module() -> None:
    for tied in (True, False):
        config = pair_config(tie_word_embeddings=tied)
        found = {name: tuple(parameter.shape) for name, parameter in tiny_pair(config).named_parameters()}
        assert parameter_shapes(config) == found


def test_axes_of_both_sides_and_the_reduction() -> None:
    spec = elastic_spec(pair_config(num_decoder_layers=2))
    assert [axis.name for axis in spec.axes] == [
        "encoder.layers.0.ffn",
        "decoder.layers.0.ffn",
        "decoder.layers.1.ffn",
        "coda.reduction",
    ]
    assert (spec.universal().id, spec.depth) == ("ffn32-coda.reduction1", 3)
    shapes = parameter_shapes(pair_config(num_decoder_layers=2))
    assert all(cut.parameter in shapes for cut in spec.slices)


def test_a_reduction_spares_the_encoder_alone() -> None:
    """Products of a pass; what the decoder makes of a prompt and of one more token does not depend on r."""
    config, bucket = pair_config(), Bucket(1, 12)
    spec = elastic_spec(config)
    whole, reduced = spec.universal(), spec.parse("ffn32-coda.reduction3")

    def products(ops: object) -> dict[str, int]:
        return {op.name: op.flops for op in ops if op.kind == "gemm"}

    passed = [products(forward_ops(config, submodel, bucket)) for submodel in (whole, reduced)]
    assert passed[0]["layers.0.ffn.up"] == 3 * passed[1]["layers.0.ffn.up"]
    assert passed[0]["decoder.layers.0.ffn.down"] == passed[1]["decoder.layers.0.ffn.down"]
    assert passed[0]["lm_head"] == 2 * 12 * 16 * 40
    read = [products(encoding_ops(config, submodel, bucket)) for submodel in (whole, reduced)]
    assert read[0]["decoder.layers.0.cross_attention.key"] == read[1]["decoder.layers.0.cross_attention.key"]
    assert products(step_ops(config.decoder, whole)) == products(step_ops(config.decoder, reduced))


READ, WRITTEN = (torch.randint(0, 40, (2, 9), generator=DRAW) for _ in range(2))
MASK = (torch.arange(9) < torch.tensor([[9], [6]])).long()


def test_padding_of_both_texts_changes_nothing() -> None:
    model = tiny_pair(pair_config())
    model.encoder.reduction = 1  # at others k follows from the padded length
    logits = model(READ, MASK, WRITTEN)
    assert logits.shape == (2, 9, 40)
    alone = model(READ[1:, :6], MASK[1:, :6], WRITTEN[1:, :4])
    torch.testing.assert_close(logits[1:, :4], alone, rtol=0, atol=1e-5)


def test_a_row_of_fewer_tokens_than_the_reduction_has_one_computed() -> None:
    model = tiny_pair(pair_config(encoder_config(reduction=3)))
    _, found = model.encoder.routed(READ[:1, :2], None)
    assert found[0].chosen.shape == (1, 1)
    assert model(READ[:, :1], MASK[:, :1], WRITTEN).shape == (2, 9, 40)


def test_the_head_is_scaled_and_tied_as_said() -> None:
    model = tiny_pair(pair_config())
    hidden = torch.ones(1, 1, 16)
    torch.testing.assert_close(model.logits(hidden)[0, 0], model.words.weight.sum(1) / 4)
    model = tiny_pair(pair_config(tie_word_embeddings=False, scale_decoder_outputs=False))
    torch.testing.assert_close(model.logits(hidden)[0, 0], model.lm_head.weight.sum(1))


CONFIG = pair_config(encoder_config(reduction=3))
IDS = torch.randint(0, 40, (1, 7), generator=torch.Generator().manual_seed(1))
BY_INDEX = {"coda.dispatch": "gather", "coda.combine": "scatter"}


def test_what_is_traced_returns_the_tokens_behind_its_outputs() -> None:
    module = Answering(tiny_pair(CONFIG))
    lowered, inputs = lower(module, BY_INDEX), (IDS, torch.ones_like(IDS), IDS)
    logits, chosen = lowered(*inputs)
    torch.testing.assert_close(logits, module(*inputs)[0])
    assert torch.equal(chosen, module.model.encoder.routed(IDS, None)[1][0].own)
    assert next(lowered.parameters()) is next(module.parameters())
    *keys, filled = SourceEncoder(lowered.model, returns_routes=True)(IDS)
    for found, expected in zip(keys, SourceEncoder(module.model)(IDS), strict=True):
        torch.testing.assert_close(found, expected)
    assert filled.tolist() == [[*chosen[0].tolist(), *[-1] * 5]]


def test_one_pass_over_both_texts_keeps_the_decoders_keys() -> None:
    model = tiny_pair(CONFIG)
    logits, key, value = RecordedPass(model)(IDS, IDS)
    torch.testing.assert_close(logits, model(IDS, torch.ones_like(IDS), IDS))
    assert key.shape == value.shape == (1, 3, 7, 8)


class Prompt:
    inputs = (TensorSpec("input_ids", "int64", (1, "sequence")),)
    outputs = (
        TensorSpec("key", "float32", (1, 3, 8, "sequence")),
        TensorSpec("value", "float32", (1, 3, "sequence", 8)),
    )


@pytest.mark.parametrize("reduction", [8, 16])
def test_a_prompt_is_traced_at_large_reductions(tmp_path: Path, reduction: int) -> None:
    """Short prompts have one token computed, and longer ones more."""
    model = tiny_pair(pair_config(encoder_config(reduction=reduction, reductions=(reduction, 1))))
    module = SourceEncoder(lower(Answering(model), BY_INDEX).model)
    ir.save(trace(module, Prompt(), Bucket(1, 24, None, 1), opset=20).model, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    for tokens in (1, 7, 17, 24):
        ids = torch.arange(tokens)[None]
        for found, expected in zip(session.run(None, {"input_ids": ids.numpy()}), module(ids), strict=True):
            np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)


ROUTES, MODEL = PairRoutes(CONFIG.encoder), tiny_pair(CONFIG)


def test_of_a_bucket_and_of_a_prompt_of_any_length() -> None:
    spec = elastic_spec(CONFIG)
    reduced = spec.parse("ffn32-coda.reduction3")
    assert [entry.shape for entry in ROUTES.entries(reduced, Bucket(2, 7))] == [(2, 3)]
    assert [entry.shape for entry in ROUTES.of_any_length(reduced, 24)] == [(1, 8)], "of 24 tokens, the longest"
    assert ROUTES.of_any_length(spec.universal(), 24) == () == ROUTES.entries(spec.universal(), Bucket(2, 7))
    assert ROUTES.metadata(reduced, Bucket(2, 7))["tokens selected"] == 3
    assert ROUTES.orders("routes.0") == {}


@pytest.mark.parametrize("kind", ["whole", "prompt", "recorded"])
def test_every_pass_takes_given_tokens_and_judges_them(kind: str) -> None:
    module, inputs = {
        "whole": (Answering(MODEL), (IDS, torch.ones_like(IDS), IDS)),
        "prompt": (SourceEncoder(MODEL), (IDS,)),
        "recorded": (RecordedPass(MODEL), (IDS, IDS)),
    }[kind]
    own = MODEL.encoder.routed(IDS, None)[1][0].own
    beyond = own if kind == "whole" else torch.cat([own, torch.full((1, 5), -1)], 1)
    right = ROUTES.replay(module, inputs, {"routes.0": beyond})
    assert right.routes["routes.0"].score_gap == 0
    for found, expected in zip(right.outputs, module(*inputs), strict=True):
        torch.testing.assert_close(found, expected)
    other = torch.tensor([[token for token in range(7) if token not in own[0]][:3]])
    wrong = ROUTES.replay(module, inputs, {"routes.0": other})
    assert wrong.routes["routes.0"].score_gap > 0
    assert not torch.allclose(wrong.outputs[0], right.outputs[0])


def test_tokens_behind_those_of_the_prompt_are_refused() -> None:
    own = MODEL.encoder.routed(IDS, None)[1][0].own
    given = torch.cat([own, torch.tensor([[-1, 5]])], 1)
    with pytest.raises(ParityError, match=r"routes\.0: expected -1 behind 3 tokens"):
        ROUTES.replay(SourceEncoder(MODEL), (IDS,), {"routes.0": given})


# Parameters of google/t5-v1_1-*.
PUBLISHED = {"base": 247_577_856, "large": 783_150_080, "xl": 2_849_757_184}


@pytest.mark.parametrize("size", PUBLISHED)
def test_what_is_frozen_is_the_published_model(size: str) -> None:
    for keys in ("k-to-k", "k-to-all"):
        source = open_source(f"preset:coda-t5-{size}-{keys}-with-decoder")
        whole = source.spec.universal()
        groups = source.named_groups(whole)
        assert source.parameters(whole) - groups["adapters"] - groups["routers"] == PUBLISHED[size]
