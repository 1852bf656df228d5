"""Models of transformers that no family names: read off their classes, compiled whole, proven like every other."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.distill import blocks_of
from nestforge.compiler.graph.store import recover_order
from nestforge.compiler.job import stated_source
from nestforge.compiler.parity.cases import parity_cases
from nestforge.compiler.parity.prove import prove_padding
from nestforge.compiler.parity.references import References
from nestforge.elastic import Axis
from nestforge.errors import CheckpointError, InputError, ParityError
from nestforge.exporters.checkpoints.checkpoint import open_checkpoint
from nestforge.exporters.hugging_face.interface import Loading
from nestforge.exporters.hugging_face.transformers_model import load_transformers
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.runtime.load import load
from safetensors.torch import load_file, save_file
from support.tiny_compile import board
from support.tiny_models import edit_config
from support.tokenizer_files import word_tokenizer

TEXT = {"vocab_size": 64, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 24}
LAYERS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TOKENS = ("batch", "sequence")


def save_model(folder: Path, class_name: str, model_type: str, **settings: Any) -> Path:
    """A random model of a class of transformers, every parameter of which matters."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("text") / "m", "DistilBertForMaskedLM", "distilbert", **TEXT)
    word_tokenizer(64).save(str(folder / "tokenizer.json"))
    return folder


def test_a_class_that_nobody_named_is_read_off_itself(text: Path) -> None:
    source = open_source(text)
    assert source.family.name == "general"
    assert source.spec.axes == (Axis("layers.0.ffn", 32), Axis("layers.0.heads", 2))
    assert source.architecture.kept_whole == ()
    assert source.signature.inputs == (
        TensorSpec("input_ids", "int64", TOKENS, pad=0, high=64),
        TensorSpec("attention_mask", "int64", TOKENS, pad=0, high=2, row_needs="token"),
    )
    assert source.signature.outputs == (TensorSpec("logits", "float32", (*TOKENS, 64)),)
    assert source.signature.max_sequence == 24
    assert source.signature.text is not None
    for width, heads in ((32, 2), (24, 2), (8, 1)):
        submodel = source.spec.from_kinds({"ffn": [width], "heads": [heads]})
        products = [op for op in source.workload(submodel, Bucket(2, 8)) if op.kind == "gemm"]
        inner = 4 * heads * 8 * 16 + 2 * 16 * width + 16 * 16 + 16 * 64  # the layer, the head's transform, vocabulary
        assert sum(op.flops for op in products) == 2 * 2 * 8 * inner


def test_texts_of_any_length_and_images_compile_with_what_shrinks(text: Path, tmp_path: Path) -> None:
    images = save_model(tmp_path / "m", "Dinov2Model", "dinov2", image_size=8, patch_size=4, mlp_ratio=2, **LAYERS)
    for model, bucket in ((text, "1..2x1..12"), (images, "2x1")):
        folder = compile_bundle(
            model=model,
            output=tmp_path / "out",
            profile=board(budgets={"full": {}}),
            levels={"ffn": [0.5, 1], "heads": [0.5, 1]},
            buckets=[bucket],
            overwrite=True,
        )
        manifest = open_bundle(folder).manifest
        assert [engine.submodel for engine in manifest.engines] == ["ffn16-heads1", "ffn32-heads2"]
        assert all((e.slice_problem, e.bucket) == (None, Bucket.parse(bucket)) for e in manifest.engines)
        assert [proof.suite for proof in manifest.proofs] == ["padding", "slice"]


def test_gate_and_queries_in_one_weight_shrink_as_the_class_made_narrower(tmp_path: Path) -> None:
    """ModernBERT, whose weights have queries, keys and values one behind the other, and an FFN's values and gate."""
    own = {"max_position_embeddings": 24, "local_attention": 8, "pad_token_id": 0, "vocab_size": 64}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    wide = save_model(tmp_path / "m", "ModernBertModel", "modernbert", **LAYERS, **own, **tokens)
    folder = compile_bundle(
        model=wide,
        output=tmp_path / "out",
        profile=board(budgets={"full": {}}),
        levels={"ffn": [0.5, 1]},
        buckets=["1..2x1..12"],
    )
    weights = load_file(wide / "model.safetensors")
    bundle = open_bundle(folder)
    universal = load_universal(stated_source(wide, bundle.manifest))
    order = recover_order(bundle.weights, universal)["layers.0.ffn"][:16]
    assert [engine.slice_problem for engine in bundle.manifest.engines] == [None, None]
    assert blocks_of(universal) == ["model.layers.0"]
    both = torch.cat([order, order + 32])
    weights["layers.0.mlp.Wi.weight"] = weights["layers.0.mlp.Wi.weight"][both]
    weights["layers.0.mlp.Wo.weight"] = weights["layers.0.mlp.Wo.weight"][:, order]
    import transformers

    narrow = transformers.ModernBertModel(
        transformers.ModernBertConfig(**{**LAYERS, "intermediate_size": 16}, **own, **tokens)
    ).eval()
    narrow.load_state_dict(weights)
    ids = np.array([[5, 9, 3, 7], [8, 2, 1, 0]])
    feeds = {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)}
    with load(folder) as model, torch.no_grad():
        expected = narrow(**{name: torch.as_tensor(array) for name, array in feeds.items()}).last_hidden_state
        found = model(feeds, submodel="ffn16-heads2").outputs["last_hidden_state"]
    kept = feeds["attention_mask"].astype(bool)
    np.testing.assert_allclose(found[kept], expected.numpy()[kept], atol=1e-5)


def test_a_class_that_lets_padding_through_compiles_for_one_row_alone(text: Path, tmp_path: Path) -> None:
    """A mask that is passed over: the answers of a filled row are not its own."""
    source = open_source(text)
    load = source.architecture.load

    def careless() -> torch.nn.Module:
        module = load()
        module.given = lambda inputs: {"input_ids": inputs["input_ids"]}
        return module

    wrong = ("1..2x1..8", "2x1..8", "2x8")
    for loaded, bucket in ((load, "1..2x1..8"), (careless, "1x1..8"), *((careless, each) for each in wrong)):
        universal = load_universal(replace(source, architecture=replace(source.architecture, load=loaded)))
        shape = Bucket.parse(bucket)
        references = References(universal, {shape: parity_cases(source.signature, shape, None)})
        if loaded is careless and bucket in wrong:
            with pytest.raises(ParityError, match=rf"bucket {bucket}: .*changes output logits.*such as 1x1\.\.8$"):
                list(prove_padding(references))
        else:
            assert [proof.subject for proof in prove_padding(references)] == ([shape.label] if loaded is load else [])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "distillery"}, "model_type 'distillery' is not supported; .*every type of the installed"),
        ({"architectures": ["pipeline"]}, "transformers has no class 'pipeline'"),
        ({"model_type": ["distilbert"]}, r"model_type \['distilbert'\] is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention: a second sequence to attend to"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type: relative_key is not supported"),
        ({"text_config": {"quantization_config": {"bits": 4}}}, "text_config.quantization_config: quantized weights"),
    ],
)
def test_refusals(text: Path, tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    (tmp_path / "config.json").write_bytes((text / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=expected):
        open_source(edit_config(tmp_path, **changes))


def test_a_tensor_without_a_place(text: Path, tmp_path: Path) -> None:
    tensors = load_file(text / "model.safetensors")
    save_file({**tensors, "extra.weight": torch.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((text / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"tensor 'extra.weight' has no place in the model"):
        open_source(tmp_path).architecture.load()


WORDS = {**LAYERS, "vocab_size": 64, "max_position_embeddings": 24}


@pytest.mark.parametrize(
    ("class_name", "model_type", "settings", "expected"),
    [
        ("TapasModel", "tapas", WORDS, "type_vocab_sizes: several types of each token"),
        ("BrosModel", "bros", WORDS, r"BrosModel reads places of words \(bbox\) of no number of places"),
    ],
)
def test_inputs_without_which_it_is_another_model(
    tmp_path: Path, class_name: str, model_type: str, settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(CheckpointError, match=expected):
        open_source(save_model(tmp_path / "m", class_name, model_type, **settings))


def test_places_of_words_are_an_input_whose_corners_may_be_in_any_order(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "LayoutLMModel", "layoutlm", max_2d_position_embeddings=32, **WORDS)
    output, whole = tmp_path / "out", {"ffn": [1], "heads": [1]}
    compile_bundle(
        model=folder, output=output, profile=board(budgets={"full": {}}), buckets=["1..2x1..8"], levels=whole
    )
    boxes = np.array([[[1, 2, 9, 20], [10, 2, 31, 20], [0, 5, 7, 6]]])
    inputs = {"input_ids": np.array([[3, 9, 27]]), "attention_mask": np.ones((1, 3), np.int64)}
    inputs |= {"token_type_ids": np.array([[0, 0, 1]]), "bbox": boxes}
    with load(output, threads=1) as model:
        found = model(inputs)["last_hidden_state"]
        turned = model({**inputs, "bbox": boxes[..., [2, 3, 0, 1]]})["last_hidden_state"]
        with pytest.raises(InputError, match="bbox"):
            model({**inputs, "bbox": boxes + 1})
    module = load_transformers(open_checkpoint(folder), Loading())
    with torch.no_grad():
        expected = module(**{name: torch.from_numpy(array) for name, array in inputs.items()}).last_hidden_state
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    np.testing.assert_array_equal(turned, found)


def test_what_engines_do_not_take_is_named(tmp_path: Path) -> None:
    sizes = {"pronunciation_vocab_size": 8, "shape_vocab_size": 8, "pronunciation_embed_dim": 4, "shape_embed_dim": 4}
    signature = open_source(save_model(tmp_path / "r", "RoCBertModel", "roc_bert", **sizes, **WORDS)).signature
    given = "input_shape_ids, input_pronunciation_ids, encoder_hidden_states, encoder_attention_mask"
    assert signature.left_out == f"inputs of the class that engines do not take: {given}"
    small = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32, "vocab_size": 64}
    signature = open_source(save_model(tmp_path / "x", "XLNetLMHeadModel", "xlnet", **small)).signature
    assert [spec.role for spec in signature.outputs] == [None]
    assert "perm_mask, target_mapping" in str(signature.left_out)


def test_a_row_is_one_choice_of_a_class_that_takes_several(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "DistilBertForMultipleChoice", "distilbert", **TEXT)
    source = open_source(folder)
    assert [(spec.name, spec.dims) for spec in source.signature.outputs] == [("logits", ("batch", 1))]
    assert list(source.spec.kinds) == ["ffn", "heads"]
    module, given = load_universal(source).module, (torch.ones((3, 5), dtype=torch.int64),) * 2
    together = {name: tensor[None] for name, tensor in zip(("input_ids", "attention_mask"), given, strict=True)}
    (logits,) = module(*given)
    assert torch.equal(logits, module.model(**together).logits.reshape(3, 1))


def test_a_series_of_numbers_is_an_input_of_one_length(tmp_path: Path) -> None:
    sizes = {"context_length": 8, "patch_length": 4, "patch_stride": 4, "num_input_channels": 2, "d_model": 16}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32}
    source = open_source(save_model(tmp_path / "m", "PatchTSTModel", "patchtst", **sizes, **layers))
    assert source.signature.inputs == (TensorSpec("past_values", "float32", ("batch", 8, 2), pad=0),)
    assert source.spec.axes == (Axis("layers.0.ffn", 32), Axis("layers.0.heads", 2))


def test_a_spectrum_may_be_an_image_of_one_channel(tmp_path: Path) -> None:
    sound = {"hidden_size": 32, "patch_embeds_hidden_size": 16, "depths": [1, 1], "num_hidden_layers": 2}
    sound |= {"num_attention_heads": [2, 2], "spec_size": 64, "num_mel_bins": 16, "window_size": 4}
    folder = save_model(tmp_path / "m", "ClapAudioModel", "clap_audio_model", **sound)
    signature = open_source(folder).signature
    assert [(spec.name, spec.dims) for spec in signature.inputs] == [("input_features", ("batch", 1, 96, 16))]
    assert "is_longer" in str(signature.left_out)


def test_bands_that_a_projection_takes_are_those_of_a_spectrum(tmp_path: Path) -> None:
    sound = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    folder = save_model(tmp_path / "m", "Wav2Vec2BertModel", "wav2vec2-bert", feature_projection_input_dim=24, **sound)
    (spectrum,) = open_source(folder).signature.inputs
    assert (spectrum.name, spectrum.dims) == ("input_features", ("batch", 96, 24))


def test_checks_of_values_that_a_class_makes_are_no_obstacle(tmp_path: Path) -> None:
    stages: dict[str, Any] = {"model_type": "rt_detr_resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16]}
    stages |= {"depths": [1, 1, 1, 1], "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}
    sizes: dict[str, Any] = {"encoder_in_channels": [8, 16, 16], "decoder_in_channels": [16, 16, 16], "d_model": 16}
    sizes |= {"encoder_hidden_dim": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 5}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_layers": 2}
    folder = save_model(
        tmp_path / "m", "RTDetrV2ForObjectDetection", "rt_detr_v2", backbone_config=stages, num_denoising=0, **sizes
    )
    assert {"ffn", "heads"} <= set(open_source(folder).spec.kinds)
    assert "TRANSFORMERS_DISABLE_TORCH_CHECK" not in os.environ, "passes with numbers make them"


def test_an_image_whose_places_stand_before_those_of_the_text_is_left_out(tmp_path: Path) -> None:
    eye = {**LAYERS, "image_size": 8, "patch_size": 4}
    folder = save_model(tmp_path / "m", "GitForCausalLM", "git", vision_config=eye, **WORDS)
    signature = open_source(folder).signature
    assert [spec.name for spec in signature.inputs] == ["input_ids", "attention_mask"]
    assert "pixel_values: left out" in str(signature.left_out)
    assert "returns nothing per row of input_ids, attention_mask, pixel_values" in str(signature.left_out)


def test_a_type_of_several_base_models_without_a_class_is_the_first(tmp_path: Path) -> None:
    small = {"vocab_size": 64, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "block_sizes": [1, 1]}
    folder = save_model(tmp_path / "m", "FunnelModel", "funnel", num_decoder_layers=1, **small)
    assert open_source(edit_config(folder, architectures=None)).signature.outputs


def test_a_class_of_one_medium_reads_its_part_of_a_folder_of_several(tmp_path: Path) -> None:
    import transformers

    text = {"head_dim": 8, "num_key_value_heads": 2, "vocab_size": 64, "intermediate_size_mlp": 32, "moe_layers": []}
    image = {"image_size": 8, "patch_size": 4, "projector_input_dim": 16, "projector_output_dim": 16}
    parts = {"text_config": {**LAYERS, **text}, "vision_config": {**LAYERS, **image, "vision_output_dim": 16}}
    folder = save_model(tmp_path / "m", "Llama4ForConditionalGeneration", "llama4", **parts)
    whole = transformers.Llama4ForConditionalGeneration.from_pretrained(folder).eval()
    edit_config(folder, architectures=["Llama4ForCausalLM"])
    source = open_source(folder)
    assert source.spec.axes == (Axis("layers.0.ffn", 32), Axis("layers.0.heads", 2))
    ids = torch.tensor([[5, 9, 41, 7]])
    with torch.no_grad():
        (logits,) = load_universal(source).module(ids, torch.ones_like(ids))
        torch.testing.assert_close(logits, whole.language_model(ids).logits)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "language_model.other.weight": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"language_model\.other\.weight"):
        load_universal(open_source(folder))


def test_beside_modules_of_sentence_transformers_heads_alone_are_passed_over(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "DistilBertForMaskedLM", "distilbert", **TEXT)
    loading = Loading(without_pooler=True, surveyed=True)
    (folder / "modules.json").write_text("[]")
    load_transformers(open_checkpoint(folder), loading)
    tensors = load_file(folder / "model.safetensors")
    tensors["distilbert.embeddings.extra.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"embeddings.extra.weight' has no place"):
        load_transformers(open_checkpoint(folder), loading)


def test_positions_end_where_frequencies_change(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 5.0], "original_max_position_embeddings": 20}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 3.2, **factors}
    sizes = {**LAYERS, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
    source = open_source(save_model(tmp_path / "m", "Olmo2ForCausalLM", "olmo2", rope_parameters=rope, **sizes))
    assert source.signature.max_sequence == 20
    assert source.signature.shortened == "rotary positions change for texts of more, up to the 64 stated"
    module = load_universal(source).module
    before = dict(module.named_buffers()), [dict(vars(part)) for part in module.modules()]
    with torch.no_grad():
        module(torch.ones(1, 8, dtype=torch.int64), torch.ones(1, 8, dtype=torch.int64))
    assert (dict(module.named_buffers()), [dict(vars(part)) for part in module.modules()]) == before


def test_what_no_engine_computes_is_refused_early(tmp_path: Path) -> None:
    stated = {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": True}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    with pytest.raises(CheckpointError, match="alibi: Falcon multiplies it in bfloat16"):
        open_source(open_checkpoint(tmp_path, untrained=True))


def test_a_head_of_its_own_is_one_whatever_the_configuration_says(tmp_path: Path) -> None:
    """As transformers 5 saves mT5."""
    import transformers

    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = transformers.MT5ForConditionalGeneration(transformers.MT5Config(**sizes)).eval()
    model.lm_head.weight = torch.nn.Parameter(torch.randn(64, 16))
    model.save_pretrained(tmp_path / "m")
    source = open_source(tmp_path / "m")
    assert (source.checkpoint.config["tie_word_embeddings"], source.shapes["lm_head.weight"]) == (True, (64, 16))
    ids = torch.tensor([[5, 9, 3, 7]])
    with torch.no_grad():
        expected = model(input_ids=ids, decoder_input_ids=ids).logits
    found = load_universal(source).module(ids, torch.ones_like(ids), ids)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
