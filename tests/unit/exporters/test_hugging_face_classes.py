"""Each class that is read, and folders that name their tensors otherwise: planned from headers, loaded, and answered as
transformers' own class answers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.exporters.checkpoints.checkpoint import Checkpoint
from nestforge.exporters.families.gated_decoder import read_decoder_model
from nestforge.exporters.family import family_of
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from nestforge.runtime.inputs.arrays import random_feeds
from support.hugging_face_classes import (
    DECODER_CLASSES,
    DECODERS,
    ENCODER_CLASSES,
    ENCODERS,
    VISION,
    VISION_CLASSES,
    rename,
    save_class,
)
from support.tiny_compile import BUCKET as SMALL
from support.tiny_compile import board, save_tiniest
from support.tiny_models import edit_config

BUCKET = Bucket(2, 8)


def feeds_of(universal: UniversalModel) -> dict[str, torch.Tensor]:
    """Random inputs; the first row of a text model ends in padding."""
    generator, feeds = torch.Generator().manual_seed(3), {}
    for spec in universal.source.signature.inputs:
        shape = spec.shape(BUCKET)
        if spec.high is None:
            feeds[spec.name] = torch.randn(shape, generator=generator)
        elif spec.name == "attention_mask":
            feeds[spec.name] = torch.tensor([[1] * 5 + [0] * 3, [1] * 8])
        else:
            feeds[spec.name] = torch.randint(min(3, spec.high - 1), spec.high, shape, generator=generator)
            if spec.name == "input_ids":
                feeds[spec.name][0, 5:] = spec.pad
    return feeds


def transformers_answer(folder: Path, feeds: dict[str, torch.Tensor]) -> Any:
    """Answers of transformers' own class for the folder: the class that config.json names, else AutoModel's."""
    import transformers

    named = json.loads((folder / "config.json").read_text()).get("architectures")
    cls = getattr(transformers, named[0]) if named else transformers.AutoModel
    model = cls.from_pretrained(folder, dtype=torch.float32).eval()
    if named and named[0].endswith("MultipleChoice"):
        feeds = {name: tensor.unsqueeze(1) for name, tensor in feeds.items()}
    with torch.no_grad():
        return model(**feeds)


def check(folder: Path) -> UniversalModel:
    """The planner's parameters are the module's, and the answers are those of transformers' class."""
    source = open_source(folder)
    universal = load_universal(source)
    parameters = {name: tuple(value.shape) for name, value in universal.parameters().items()}
    assert dict(source.shapes) == parameters
    for name, shape in parameters.items():
        place = source.architecture.place_in_files(name, shape)
        assert source.checkpoint.tensors[place.tensor].shape == place.shape, name
    feeds = feeds_of(universal)
    expected = transformers_answer(folder, feeds)
    found = universal.module(*feeds.values())
    for spec, output in zip(source.signature.outputs, found, strict=True):
        assert tuple(output.shape) == spec.shape(BUCKET), spec.name
        if spec.name != "embedding":  # ours: the state of [CLS]
            torch.testing.assert_close(output, expected[spec.name], rtol=0, atol=1e-6)
    return universal


@pytest.mark.parametrize(("model_type", "class_name"), [*ENCODER_CLASSES, *DECODER_CLASSES, *VISION_CLASSES])
def test_every_class_answers_as_transformers_does(tmp_path: Path, model_type: str, class_name: str) -> None:
    check(save_class(tmp_path / "m", model_type, class_name))


def prefixed(prefix: str) -> Callable[[str], str]:
    return lambda name: f"{prefix}.{name}"


def bare(prefix: str) -> Callable[[str], str]:
    return lambda name: name.removeprefix(f"{prefix}.")


def google(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


# A folder as saved, what is done to it, and the outputs that are left of it.
VARIANTS: dict[str, tuple[tuple[str, str], Callable[[Path], object], list[str]]] = {
    "bert. before a BertModel": (
        ("bert", "BertModel"),
        lambda m: rename(m, prefixed("bert")),
        ["last_hidden_state", "pooler_output"],
    ),
    "roberta. before a model without a class": (
        ("roberta", "RobertaModel"),
        lambda m: edit_config(rename(m, prefixed("roberta")), architectures=None),
        ["last_hidden_state", "pooler_output"],
    ),
    "no bert. before a classifier": (
        ("bert", "BertForSequenceClassification"),
        lambda m: rename(m, bare("bert")),
        ["logits"],
    ),
    "no roberta. before an XLM-R classifier": (
        ("xlm-roberta", "XLMRobertaForSequenceClassification"),
        lambda m: rename(m, bare("roberta")),
        ["logits"],
    ),
    "no electra. before a discriminator": (
        ("electra", "ElectraForPreTraining"),
        lambda m: rename(m, bare("electra")),
        ["logits"],
    ),
    "LayerNorm.gamma": (
        ("bert", "BertForPreTraining"),
        lambda m: rename(m, google),
        ["prediction_logits", "seq_relationship_logits"],
    ),
    "MaskedLM as a BertModel": (
        ("bert", "BertForMaskedLM"),
        lambda m: edit_config(m, architectures=["BertModel"]),
        ["last_hidden_state"],
    ),
    "MaskedLM without a class": (
        ("camembert", "CamembertForMaskedLM"),
        lambda m: edit_config(m, architectures=None),
        ["last_hidden_state"],
    ),
    "PreTraining as MaskedLM": (
        ("bert", "BertForPreTraining"),
        lambda m: edit_config(rename(m, google), architectures=["BertForMaskedLM"]),
        ["logits"],
    ),
    "PreTraining as NextSentencePrediction": (
        ("bert", "BertForPreTraining"),
        lambda m: edit_config(m, architectures=["BertForNextSentencePrediction"]),
        ["logits"],
    ),
    "an untied head": (("bert", "BertForMaskedLM"), lambda m: None, ["logits"]),
    "qwen3 without model.": (("qwen3", "Qwen3ForCausalLM"), lambda m: rename(m, bare("model")), ["logits"]),
    "qwen3 without model. and without a class": (
        ("qwen3", "Qwen3ForCausalLM"),
        lambda m: edit_config(rename(m, bare("model")), architectures=[]),
        ["last_hidden_state"],
    ),
    "a language model as its decoder": (
        ("llama", "LlamaForCausalLM"),
        lambda m: edit_config(m, architectures=["LlamaModel"]),
        ["last_hidden_state"],
    ),
    "a decoder as the text part of a multimodal folder": (
        ("gemma3n_text", "Gemma3nForCausalLM"),
        lambda m: edit_config(rename(m, lambda n: n.replace("model.", "model.language_model.", 1)), architectures=None),
        ["last_hidden_state"],
    ),
    "no transformer. before what answers questions": (
        ("llama", "LlamaForQuestionAnswering"),
        lambda m: rename(m, bare("transformer")),
        ["start_logits", "end_logits"],
    ),
    "a token head without bias": (("llama", "LlamaForTokenClassification"), lambda m: None, ["logits"]),
    "vit. before a ViTModel": (
        ("vit", "ViTModel"),
        lambda m: rename(m, prefixed("vit")),
        ["last_hidden_state", "pooler_output", "embedding"],
    ),
    "no vit. before an image classifier": (
        ("vit", "ViTForImageClassification"),
        lambda m: rename(m, bare("vit")),
        ["logits"],
    ),
    "a masked image model as a DeiTModel": (
        ("deit", "DeiTForMaskedImageModeling"),
        lambda m: edit_config(m, architectures=["DeiTModel"]),
        ["last_hidden_state", "embedding"],
    ),
}
_KEYS: dict[str, dict[str, Any]] = {
    "an untied head": {"tie_word_embeddings": False},
    "a token head without bias": {"token_classification_bias": False},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_names_are_resolved_as_transformers_resolves_them(tmp_path: Path, name: str) -> None:
    (model_type, class_name), change, outputs = VARIANTS[name]
    folder = save_class(tmp_path / "m", model_type, class_name, **_KEYS.get(name, {}))
    change(folder)
    universal = check(folder)
    assert [spec.name for spec in universal.source.signature.outputs] == outputs


_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "image_size", "patch_size", "d_model", "d_kv", "d_ff", "num_heads"),
)
_MODEL_TYPES = sorted({*ENCODERS, *DECODERS, *VISION, "gpt2", "t5"})


@pytest.mark.parametrize("model_type", _MODEL_TYPES)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    """A folder that states its sizes alone is read as one that states every key of the class."""
    import transformers

    stated = {
        **transformers.AutoConfig.for_model(model_type).to_dict(),
        "model_type": model_type,
        "architectures": None,
    }
    if model_type == "t5":
        stated["architectures"] = ["T5EncoderModel"]
    sizes = {key: stated[key] for key in ("model_type", "architectures", *_SIZES) if key in stated}
    checkpoints = [Checkpoint(Path("m"), config, {}, missing="not trained") for config in (sizes, stated)]
    read = [family_of(checkpoint).read(checkpoint) for checkpoint in checkpoints]
    for told in ("parameter_shapes", "spec", "signature"):
        assert getattr(read[0], told) == getattr(read[1], told), told
    if model_type in DECODERS:  # windows too; what may be left to other keys is compared as the model has it
        left = {"num_key_value_heads": None, "head_dim": None, "use_bidirectional_attention": None}
        models = map(read_decoder_model, checkpoints)
        first, second = (replace(model, stated=replace(model.stated, **left)) for model in models)
        assert first == second


@pytest.mark.parametrize(
    ("model_type", "class_name", "outputs"),
    [
        ("bert", "BertForQuestionAnswering", ["start_logits", "end_logits"]),
        ("bert", "BertForMultipleChoice", ["logits"]),
        ("electra", "ElectraForPreTraining", ["logits"]),
        ("llama", "LlamaForSequenceClassification", ["logits"]),
        ("qwen3", "Qwen3Model", ["last_hidden_state"]),
        ("vit", "ViTForMaskedImageModeling", ["reconstruction"]),
    ],
)
def test_a_head_is_compiled_and_answers_as_transformers_does(
    tmp_path: Path, model_type: str, class_name: str, outputs: list[str]
) -> None:
    import transformers

    folder = save_class(tmp_path / "m", model_type, class_name, num_hidden_layers=1)
    compile_bundle(folder, board(budgets={"full": {}}), tmp_path / "b")
    bundle = open_bundle(tmp_path / "b")
    signature = open_source(folder).signature
    assert [spec.name for spec in bundle.manifest.outputs] == outputs
    assert {engine.emitted for engine in bundle.manifest.engines} == {"sliced"}
    feeds = random_feeds(signature.inputs, signature.buckets([SMALL], [SMALL])[0])
    given = {name: torch.from_numpy(array) for name, array in feeds.items()}
    if class_name.endswith("MultipleChoice"):
        given = {name: tensor.unsqueeze(1) for name, tensor in given.items()}
    with torch.no_grad():
        expected = getattr(transformers, class_name).from_pretrained(folder, dtype=torch.float32).eval()(**given)
    with nestforge.load(tmp_path / "b") as model:
        answer = model(feeds)
    for name in outputs:
        np.testing.assert_allclose(answer[name], expected[name].numpy(), atol=2e-5, rtol=1e-4, err_msg=name)


def test_text_is_tokenised_as_transformers_does(tmp_path: Path) -> None:
    """tokenizer_config.json says the opposite of tokenizer.json, which lowers case."""
    import transformers

    folder = save_tiniest(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": false}')
    compile_bundle(folder, board(budgets={"full": {}}), tmp_path / "b", include="budgets")
    text = "the Quick FOX"
    given = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    assert given["input_ids"].tolist() == [[2, 4, 1, 1, 3]]
    with torch.no_grad():
        expected = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()(**given)
    with nestforge.load(tmp_path / "b") as model:
        answer = model(text)
    np.testing.assert_allclose(answer["last_hidden_state"], expected["last_hidden_state"].numpy(), atol=2e-5, rtol=1e-4)
