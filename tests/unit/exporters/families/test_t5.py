"""T5 from its folder: axes, parameters, what it answers, what a narrowed module computes, what is refused."""

from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
import transformers
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint
from nestforge.exporters.families.t5 import FAMILY
from nestforge.exporters.published_slices import read_slice
from nestforge.exporters.source import ModelSource, open_source
from nestforge.exporters.universal import load_universal
from nestforge.runtime.consistency.measure import consistency
from nestforge.runtime.inputs.text import TextEncoder
from nestforge.tools.commands.run import best_answers
from nestforge.workload import macs
from safetensors.torch import load_file, save_file
from support.tiny_compile import assert_tensorrt_takes, board, builder_in, template_of
from support.tiny_models import TINY_T5, V1_1, add_pooling, corpus, edit_config, make_t5, save_t5
from torch.nn import functional

_RANDOM = torch.Generator().manual_seed(1)
IDS, FOLLOWS = (torch.randint(3, 512, (2, 30), generator=_RANDOM) for _ in range(2))
MASK = (torch.arange(30) < torch.tensor([[30], [17]])).long()
FORMS: dict[str, dict[str, Any]] = {
    "relu": {},
    "v1.1": V1_1,
    "gated-silu, scaled": {"feed_forward_proj": "gated-silu"},
    "gelu, not scaled, tied": {"feed_forward_proj": "gelu", "scale_decoder_outputs": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_t5(tmp_path_factory.mktemp("t5") / "t5", **V1_1)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_answers_as_transformers_does_and_config_json_alone_tells_its_parameters(
    tmp_path: Path, form: str
) -> None:
    folder = save_t5(tmp_path / "m", **FORMS[form])
    universal = load_universal(open_source(folder))
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(input_ids=IDS, attention_mask=MASK, decoder_input_ids=FOLLOWS).logits
    torch.testing.assert_close(universal.module(IDS, MASK, FOLLOWS)[0], expected, rtol=0, atol=1e-5)
    assert ("lm_head.weight" in universal.source.shapes) == (form == "v1.1")
    (folder / "model.safetensors").unlink()
    untrained = open_source(folder)
    assert untrained.spec == universal.spec
    if form != "gelu, not scaled, tied":  # only the weights say that
        assert dict(untrained.shapes) == dict(universal.source.shapes)


def test_the_encoder_alone_reads_a_folder_of_the_whole(folder: Path, tmp_path: Path) -> None:
    model = transformers.T5EncoderModel.from_pretrained(folder).eval()
    alone = save_t5(tmp_path / "m", **V1_1)
    source = open_source(edit_config(alone, architectures=["T5EncoderModel"]))
    assert [spec.name for spec in source.signature.outputs] == ["last_hidden_state"]
    assert [axis.name for axis in source.spec.axes] == ["encoder.layers.0.ffn"]
    assert not [name for name in source.shapes if name.startswith(("decoder", "lm_head"))]
    with torch.no_grad():
        expected = model(input_ids=IDS, attention_mask=MASK).last_hidden_state
    torch.testing.assert_close(load_universal(source).module(IDS, MASK)[0], expected, rtol=0, atol=1e-5)


def test_sentence_transformers_modules_stand_behind_the_encoder(tmp_path: Path) -> None:
    """From a folder of the whole too, as sentence-transformers reads it."""
    folder = edit_config(save_t5(tmp_path / "m"), hidden_size=16)
    add_pooling(folder)
    universal = load_universal(open_source(folder))
    hidden, embedding = universal.module(IDS, MASK)
    expected = functional.normalize((hidden * MASK[:, :, None]).sum(1) / MASK.sum(1, keepdim=True), dim=-1)
    torch.testing.assert_close(embedding, expected)


def test_a_narrowed_module_is_one_with_the_rest_at_zero(folder: Path) -> None:
    universal = load_universal(open_source(folder))
    submodel = universal.spec.from_kinds({"ffn": [8, 24, 16]})
    zeroed = make_t5(**V1_1)
    for stack, block, place, width in (("encoder", 0, 1, 8), ("decoder", 0, 2, 24), ("decoder", 1, 2, 16)):
        zeroed.get_submodule(f"{stack}.block.{block}.layer.{place}.DenseReluDense").wo.weight[:, width:] = 0
    expected = zeroed(input_ids=IDS, attention_mask=MASK, decoder_input_ids=FOLLOWS).logits
    torch.testing.assert_close(universal.narrow(submodel)(IDS, MASK, FOLLOWS)[0], expected, rtol=0, atol=1e-5)


def test_a_text_feeds_both_sides_the_second_one_place_later(folder: Path) -> None:
    source = open_source(folder)
    assert source.signature.text is not None
    encoder = TextEncoder(folder / "tokenizer.json", source.signature.text, source.signature.inputs)
    feeds = encoder.encode(["the file", "a subprocess that is waited for"], 64).feeds
    ids, mask, follows = feeds["input_ids"], feeds["attention_mask"], feeds["decoder_input_ids"]
    assert [row[kept][-1] for row, kept in zip(ids, mask == 1, strict=True)] == [TINY_T5["eos_token_id"]] * 2
    np.testing.assert_array_equal(follows[:, 0], [0, 0])
    length = mask[0].sum()
    np.testing.assert_array_equal(follows[0, 1:length], ids[0, : length - 1])
    assert not follows[0, length:].any()


# Parameters that the publishers' own pages state (without the copies of tables), from the files they publish.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "t5-small": ({"d_ff": 2048, "d_kv": 64, "d_model": 512, "num_heads": 8, "num_layers": 6}, 60_506_624),
    "t5-base": ({"d_ff": 3072, "d_kv": 64, "d_model": 768, "num_heads": 12, "num_layers": 12}, 222_903_552),
    "flan-t5-small": (
        {"d_ff": 1024, "d_kv": 64, "d_model": 512, "num_heads": 6, "num_layers": 8, **V1_1},
        76_961_152,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name: str) -> None:
    config, parameters = PUBLISHED[name]
    source = untrained({**config, "vocab_size": 32128})
    assert source.parameters(source.spec.universal()) == parameters
    tables = source.parameter_groups(source.spec.universal()).embedding
    assert tables == 32128 * config["d_model"] * (2 if "flan" in name else 1)


def untrained(config: dict[str, Any]) -> ModelSource:
    named = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0}
    checkpoint = Checkpoint(Path("m"), {**named, **config}, {}, missing="not trained")
    return ModelSource(checkpoint, FAMILY, FAMILY.read(checkpoint))


def test_multiply_adds_by_hand(folder: Path) -> None:
    source, tokens = open_source(folder), 2 * 8
    attention = 4 * 16 * 24 + 2 * 8 * 24  # per token: four projections; scores of 8 keys, and their context
    ffn = 3 * 16 * 24
    expected = tokens * (3 * (attention + ffn) + 2 * attention + 16 * 512)
    assert macs(source.workload(source.spec.parse("ffn24"), Bucket(2, 8))) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"architectures": ["T5ForQuestionAnswering"]},
            "expected T5ForConditionalGeneration or T5EncoderModel, got 'T5ForQuestionAnswering'",
        ),
        ({"architectures": None}, "architectures: expected T5ForConditionalGeneration or T5EncoderModel, got None"),
        ({"feed_forward_proj": "gated-prelu"}, "feed_forward_proj: expected an activation, such as relu, or gated-"),
        ({"feed_forward_proj": "dense-relu"}, "feed_forward_proj: expected an activation, such as relu, or gated-"),
        ({"decoder_start_token_id": None}, "decoder_start_token_id: expected a token of the vocabulary, 0..511"),
        (
            {"relative_attention_max_distance": 4},
            "relative_attention_max_distance: expected a whole number of at least",
        ),
        ({"relative_attention_max_distance": 2**31}, "relative_attention_max_distance: expected at most 65536"),
        ({"decoder_start_token_id": 512}, "decoder_start_token_id: expected a token of the vocabulary, 0..511"),
        ({"d_ff": [32, 32, 32]}, "d_ff: expected a whole number of at least 1"),
        ({"d_ff": 64}, "wi_0.weight has shape [32, 16]; expected [64, 16] as config.json says"),
        ({"feed_forward_proj": "relu"}, "DenseReluDense.wi.weight is missing from the weights"),
        ({"num_decoder_layers": 1}, "'decoder.block.1.layer.0.SelfAttention.k.weight' has no place in the model"),
    ],
)
def test_one_line_says_what_is_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    folder = edit_config(save_t5(tmp_path / "m", text=False, **V1_1), **changes)
    (folder / "generation_config.json").unlink()  # states the decoder's start too
    with pytest.raises(CheckpointError) as failure:
        open_source(folder)
    message = str(failure.value)
    assert expected in message
    assert "\n" not in message


def test_copies_of_the_table_are_no_parameters(tmp_path: Path) -> None:
    folder = save_t5(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    save_file(tensors | {name: tensors["shared.weight"].clone() for name in copies}, folder / "model.safetensors")
    source = open_source(folder)
    assert not set(copies) & set(source.shapes)
    load_universal(source)


def test_a_head_that_equals_the_table_is_its_own_where_outputs_are_not_scaled(tmp_path: Path) -> None:
    """transformers ties the two; files of v1.1 hold both."""
    folder = save_t5(tmp_path / "m", **V1_1)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["shared.weight"].clone()}, folder / "model.safetensors")
    universal = load_universal(open_source(folder))
    assert universal.parameters()["lm_head.weight"] is not universal.parameters()["shared.weight"]


BUCKET = Bucket(2, 24)


@pytest.mark.parametrize("changes", [{}, V1_1], ids=["relu", "v1.1"])
def test_both_sides_are_sliced_and_equal_pytorch(tmp_path: Path, changes: dict[str, Any]) -> None:
    universal = load_universal(open_source(save_t5(tmp_path / "m", **changes)))
    template = template_of(universal, BUCKET)
    assert template.slice_problem is None
    builder = builder_in(tmp_path / "bundle", universal, template, board(budgets={"full": {}}))
    for widths in ([8, 16, 32], [32, 32, 32]):
        entry = builder.build(universal.spec.from_kinds({"ffn": widths}), BUCKET)
        assert (entry.emitted, entry.slice_problem) == ("sliced", None)
        assert entry.parity is not None
    assert_tensorrt_takes(tmp_path / "bundle")


def test_a_bundle_of_a_range_answers_pairs_of_texts(tmp_path: Path) -> None:
    folder = save_t5(tmp_path / "m", **V1_1)
    options: dict[str, Any] = {"include": "budgets", "buckets": [Bucket(20, 40, 1, 1)], "measure": False}
    path = nestforge.compile(
        folder, board(budgets={"full": {}}), tmp_path / "b", text=corpus(tmp_path / "texts"), **options
    )
    rng = np.random.default_rng(0)
    ids, follows = (rng.integers(3, 512, (20, 33)) for _ in range(2))
    mask = (np.arange(33) < np.array([[33], [20]] * 10)).astype(np.int64)
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            decoder_input_ids=torch.from_numpy(follows),
        ).logits
    with nestforge.load(path) as loaded:
        answer = loaded({"input_ids": ids, "attention_mask": mask, "decoder_input_ids": follows})
        np.testing.assert_allclose(answer.outputs["logits"], expected.numpy(), atol=1e-4)
        of_text = loaded("the file")
        assert of_text.outputs["logits"].shape[::2] == (1, 512)
        assert best_answers(loaded.bundle, of_text, [3]) is None, "both sides read the text"
    np.savez(tmp_path / "pairs.npz", input_ids=ids, attention_mask=mask, decoder_input_ids=follows)
    (found,) = consistency(open_bundle(path), data=tmp_path / "pairs.npz").submodels
    loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), torch.from_numpy(follows[:, 1:]).flatten())
    assert found.figures["loss"] == pytest.approx(loss.item(), abs=1e-4), "of what the decoder continues, all of it"


def test_a_narrower_t5_is_a_slice(tmp_path: Path) -> None:
    wide = save_t5(tmp_path / "wide")
    narrow = save_t5(tmp_path / "narrow", d_ff=16)
    tensors, small = (load_file(folder / "model.safetensors") for folder in (wide, narrow))
    cut = {name: tensors[name][tuple(slice(n) for n in tensor.shape)].contiguous() for name, tensor in small.items()}
    save_file(cut, narrow / "model.safetensors", {"format": "pt"})
    assert read_slice(open_source(wide), narrow).id == "ffn16"
