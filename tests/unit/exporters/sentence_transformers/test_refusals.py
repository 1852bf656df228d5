"""Unknown parts of a folder of sentence-transformers stop the import in one line that names them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.exporters.source import ModelSource, open_source
from nestforge.exporters.universal import load_universal
from safetensors.torch import save_file
from support.tiny_compile import save_tiniest
from support.tiny_models import save_tiny_vit

HIDDEN = 16
POOLING = {"embedding_dimension": HIDDEN, "pooling_mode": "mean"}
DENSE = {"in_features": HIDDEN, "out_features": 8, "activation_function": "torch.nn.modules.activation.Tanh"}
PREFIX = "sentence_transformers.models."


def write(folder: Path, *modules: tuple[str, Mapping[str, Any] | None], **files: object) -> Path:
    """Modules behind a tiny transformer: the type's last part, or the whole type, with their config.json."""
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{PREFIX}Transformer"}]
    for place, (kind, config) in enumerate(modules, 1):
        path = f"{place}_{kind.rpartition('.')[2]}"
        (folder / path).mkdir()
        if config is not None:
            (folder / path / "config.json").write_text(json.dumps(config))
        kind = kind if "." in kind else f"{PREFIX}{kind}"
        entries.append({"idx": place, "name": str(place), "path": path, "type": kind})
    (folder / "modules.json").write_text(json.dumps(entries))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiniest(tmp_path_factory.mktemp("plain") / "m")


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    own = tmp_path / "m"
    own.mkdir()
    for path in plain.iterdir():
        (own / path.name).symlink_to(path)
    return own


def refused(folder: Path, message: str) -> None:
    def whole(source: ModelSource) -> None:
        assert source.signature

    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        whole(open_source(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "kind",
    [
        *("CNN", "LSTM", "WordEmbeddings", "WordWeights", "BoW", "CLIPModel", "Asym", "Router", "StaticEmbedding"),
        "WeightedLayerPooling",
        "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling",
        "sentence_transformers.multi_vector_encoder.modules.token_pooling.Pooling",
        "my_package.modules.Pooling",
    ],
)
def test_a_module_that_is_not_known_is_named(folder: Path, kind: str) -> None:
    write(folder, ("Pooling", POOLING), (kind, {}))
    whole = kind if "." in kind else f"{PREFIX}{kind}"
    refused(folder, f"modules.json: module 2 ('2_{kind.rpartition('.')[2]}') is '{whole}', which is not supported here")


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([("Pooling", {**POOLING, "pooling_mode": "median"})], "pooling_mode: got 'median'; did you mean 'mean'?"),
        ([("Pooling", {**POOLING, "pooling_mode": []})], "pooling_mode: expected at least one of cls, max, mean"),
        ([("Pooling", {"pooling_mode_mean_tokens": 1})], "pooling_mode_mean_tokens: expected true or false, got 1"),
        ([("Pooling", {**POOLING, "trim": 3})], "1_Pooling/config.json: unknown key 'trim'"),
        ([("Pooling", {})], "1_Pooling/config.json: missing key 'embedding_dimension'"),
        (
            [("Pooling", {**POOLING, "embedding_dimension": 32})],
            "module 1 (1_Pooling, Pooling) takes 32 numbers of",
        ),
        (
            [("Normalize", None), ("Pooling", POOLING)],
            "(1_Normalize, Normalize) reads sentence_embedding, which",
        ),
        ([("Normalize", {"module_input_name": "token_embeddings"})], "no module makes a sentence_embedding"),
        ([], "no module makes a sentence_embedding; expected a Pooling"),
        ([("Pooling", POOLING), ("Normalize", {"module_input_name": "colours"})], "module_input_name: got 'colours'"),
        ([("Pooling", POOLING), ("LayerNorm", {"dimension": 8})], "(2_LayerNorm, LayerNorm) takes 8 numbers of sent"),
        (
            [("Pooling", POOLING), ("Dense", {**DENSE, "activation_function": "torch.nn.modules.activation.PReLU"})],
            "activation_function 'torch.nn.modules.activation.PReLU' is not supported; expected torch.nn's ELU, GELU",
        ),
        (
            [("Pooling", POOLING), ("Dense", {**DENSE, "activation_function": "os.system"})],
            "activation_function 'os.system' is not supported",
        ),
        (
            [("Dense", {**DENSE, "module_input_name": "token_embeddings", "module_output_name": "sentence_embedding"})],
            "reads token_embeddings and writes sentence_embedding: only Pooling makes one of the other",
        ),
    ],
    ids=range(14),
)
def test_a_config_that_is_not_understood_is_named(
    folder: Path, modules: Sequence[tuple[str, Mapping[str, Any] | None]], message: str
) -> None:
    refused(write(folder, *modules), message)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "config_sentence_transformers",
            {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.Sigmoid"},
            "model_type 'CrossEncoder', which scores pairs of texts, is not supported; expected 'SentenceTransformer'",
        ),
        ("config_sentence_transformers", {"model_type": ["X"]}, "model_type ['X'] is not supported"),
        ("config_sentence_transformers", {"default_prompt_name": "q"}, "default_prompt_name 'q'; expected one of none"),
        ("config_sentence_transformers", {"promts": {}}, "unknown key 'promts'; did you mean 'prompts'?"),
        ("sentence_bert_config", {"transformer_task": "fill-mask"}, "transformer_task 'fill-mask' is not supported"),
        ("sentence_bert_config", {"max_seq_length": 0}, "max_seq_length: expected at least 1, got 0"),
        ("sentence_bert_config", {"modality_config": {"message": {}}}, "modality_config of 'message' is not supported"),
        (
            "sentence_bert_config",
            {"processing_kwargs": {"text": {"max_length": 3}}},
            "processing_kwargs is not support",
        ),
        ("sentence_bert_config", {"query_length": 32}, "query_length is not supported"),
        ("sentence_bert_config", {"model_args": {"rotary_base": 5}}, "model_args: 'rotary_base' is not supported"),
        ("sentence_bert_config", {"tokenizer_args": {"use_fast": False}}, "tokenizer_args: 'use_fast' is not support"),
        ("sentence_bert_config", {"lower": True}, "unknown key 'lower'"),
        ("tokenizer_config", {"truncation_side": "left"}, "truncation_side 'left' is not supported"),
        ("tokenizer_config", {"model_max_length": "512"}, "model_max_length: expected a whole number of at least 1"),
        ("tokenizer_config", {"model_max_length": 0}, "model_max_length: expected a whole number of at least 1, got 0"),
    ],
    ids=range(15),
)
def test_a_setting_that_is_not_understood_is_named(folder: Path, file: str, content: object, message: str) -> None:
    refused(write(folder, ("Pooling", POOLING), **{file: content}), f"{file}.json: {message}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: {}, "expected a JSON list, got dict"),
        (lambda m: [], "expected 1 to 64 modules, got 0"),
        (lambda m: m * 40, "expected 1 to 64 modules, got 80"),
        (lambda m: [m[0], {**m[1], "name": "0"}], "two modules have one name among 0, 0"),
        (lambda m: [m[0], {**m[1], "path": "../other"}], "module 1 ('../other'): path may leave the model folder"),
        (lambda m: [m[0], {**m[1], "path": ".."}], "module 1 ('..'): path may leave the model folder"),
        (lambda m: [{**m[0], "path": "0_Transformer"}, m[1]], "module 0 ('0_Transformer'): the transformer lies"),
        (lambda m: [m[1], m[0]], "module 0 ('1_Pooling') is 'sentence_transformers.models.Pooling', which is not supp"),
        (lambda m: [{**m[0], "weight": 2}, m[1]], "module 0: unknown key 'weight'"),
    ],
    ids=range(9),
)
def test_a_list_of_modules_that_makes_no_sense(folder: Path, change: Callable[[Any], Any], message: str) -> None:
    path = write(folder, ("Pooling", POOLING)) / "modules.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    refused(folder, f"modules.json: {message}")


def tensors(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"linear.weight": torch.ones(8, HIDDEN), "linear.bias": torch.ones(8), **changes}


def test_weights_that_misfit_are_not_there_pickled_or_not_finite(folder: Path) -> None:
    write(folder, ("Pooling", POOLING), ("Dense", DENSE))
    weights = folder / "2_Dense" / "model.safetensors"
    refused(folder, "2_Dense/model.safetensors: no such file; load the model with sentence-transformers")
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"a pickle")
    refused(folder, "2_Dense/pytorch_model.bin: pickled weights are refused since loading them can run code")
    save_file(tensors(**{"linear.weight": torch.ones(8, 9)}), weights)
    refused(folder, "2_Dense: tensor linear.weight has shape [8, 9]; expected [8, 16] as config.json says")
    save_file(tensors(scale=torch.ones(1)), weights)
    refused(folder, "2_Dense: tensor 'scale' has no place in the model that config.json describes")
    save_file(tensors(**{"linear.bias": torch.full((8,), torch.nan)}), weights)
    with pytest.raises(CheckpointError, match=r"tensor linear\.bias holds NaN or infinite values"):
        load_universal(open_source(folder))


def test_a_pooling_that_no_list_names_is_not_passed_over(folder: Path) -> None:
    write(folder, ("Pooling", POOLING))
    (folder / "modules.json").unlink()
    refused(folder, "1_Pooling: a module of sentence-transformers, and no modules.json says when it runs")


def test_a_cross_encoder_is_named(folder: Path) -> None:
    """As version 6.2 saves one: a transformer alone."""
    refused(
        write(folder, config_sentence_transformers={"model_type": "CrossEncoder"}),
        "config_sentence_transformers.json: model_type 'CrossEncoder', which scores pairs of texts, is not supported",
    )


def test_a_transformer_in_a_folder_of_its_own_is_named(folder: Path) -> None:
    write(folder, ("Pooling", POOLING))
    own = folder / "0_Transformer"
    own.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).rename(own / name)
    refused(
        folder,
        "its first module is no transformer, or lies in a folder of its own, as old versions saved "
        f"it; SentenceTransformer({str(folder)!r}).save(NEW_FOLDER) writes the folder that",
    )


def test_a_family_that_takes_no_modules_says_so(tmp_path: Path) -> None:
    folder = write(save_tiny_vit(tmp_path / "vit"), ("Pooling", POOLING))
    refused(folder, "models of family vit run without modules of sentence-transformers")
