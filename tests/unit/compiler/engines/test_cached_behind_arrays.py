"""Encoder-decoders whose encoder reads an array, such as Whisper: what their bundles write, beside transformers."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.job import resolve
from nestforge.compiler.verify import verify_bundle
from nestforge.elastic import PrefixSlice
from nestforge.errors import InputError, PlanError
from nestforge.exporters.source import open_source
from nestforge.profiles.compile_request import CompileRequest
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.commands import error_of
from support.processes import DEVICE_PROGRAM
from support.sealing import reseal
from support.servers import serving
from support.tiny_compile import board
from support.tiny_models import edit_config
from support.tokenizer_files import save_tokenizer, word_tokenizer

SIZES: dict[str, Any] = {"d_model": 32, "vocab_size": 96, "max_target_positions": 40, "eos_token_id": None}
SIDES = ("encoder", "decoder")
for _side in SIDES:
    SIZES |= {f"{_side}_layers": 1, f"{_side}_ffn_dim": 32, f"{_side}_attention_heads": 4}
VIT = {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 40, "vocab_size": 96, "eos_token_id": None}
# Tokens 3, 7 and 11 are likely in these models; some of them may not come, or not at first.
SUPPRESSED = {"suppress_tokens": [7, 15, 30, 62], "begin_suppress_tokens": [3, 11, 27, 95]}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "whisper": ("WhisperForConditionalGeneration", {"num_mel_bins": 8, "max_source_positions": 20, **SUPPRESSED}),
    # The array is longer than what its convolutions leave of it for the decoder.
    "speech_to_text": (
        "Speech2TextForConditionalGeneration",
        {"max_source_positions": 96, "input_feat_per_channel": 8, "conv_channels": 8},
    ),
    # Attention is said not to be causal where it has a mask that is; the encoder returns a mask too.
    "moonshine": (
        "MoonshineForConditionalGeneration",
        {"hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 40}
        | {f"{side}_num_{what}": n for side in SIDES for what, n in (("hidden_layers", 1), ("attention_heads", 4))},
    ),
    # Two models: the class hands on what the decoder takes, and projects what the encoder returns.
    "vision-encoder-decoder": (
        "VisionEncoderDecoderModel",
        {
            "encoder": {"model_type": "vit", "image_size": 8, "patch_size": 4, "hidden_size": 16, **VIT},
            "decoder": {"model_type": "gpt2", "add_cross_attention": True, "is_decoder": True, **GPT2},
        },
    ),
}
SHAPES = {"whisper": (8, 40), "speech_to_text": (96, 8), "moonshine": (16000,), "vision-encoder-decoder": (3, 8, 8)}
PLACES = {"whisper": 20, "speech_to_text": 24, "moonshine": 40, "vision-encoder-decoder": 5}
TOKENS = 12
SMALL = {"whisper": "ffn16-heads2-heads_b2", "speech_to_text": "ffn16", "moonshine": "ffn16"}
SMALL |= {"vision-encoder-decoder": "ffn16-heads2"}


def save(folder: Path, model_type: str, **settings: Any) -> Path:
    """A random model, with small embeddings of tokens so that texts vary, whose steps keep their order; ``settings``
    are of its generation."""
    import transformers

    name, own = CLASSES[model_type]
    torch.manual_seed(0)
    tokens = {"pad_token_id": 1, "bos_token_id": 0, "decoder_start_token_id": 2}
    sizes = {} if "decoder" in own else SIZES
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, **tokens, **own})
    model = getattr(transformers, name)(config)
    for place, parameter in model.named_parameters():
        if "norm" not in place and "ln_" not in place and parameter.requires_grad:
            far = any(part in place for part in ("position", "wpe", "encoder_attn", "crossattention"))
            size = 0.03 if "embed_tokens" in place or "wte" in place else 1.0 if far else 0.3
            parameter.data = size * torch.randn_like(parameter)
    for key, value in {**settings, "_from_model_config": not settings}.items():
        setattr(model.generation_config, key, value)
    model.save_pretrained(folder)
    return edit_config(folder, nested=True)


def heard(model_type: str, rows: int = 3) -> torch.Tensor:
    return torch.randn((rows, *SHAPES[model_type]), generator=torch.Generator().manual_seed(1))


def written_by_transformers(
    folder: Path, model_type: str, cuts: Iterable[PrefixSlice] = (), **given: Any
) -> list[tuple[int, ...]]:
    """By transformers' own class, where the second half of all neurons and heads in ``cuts`` adds zeros."""
    import transformers

    module: Any = getattr(transformers, CLASSES[model_type][0]).from_pretrained(folder, dtype=torch.float32).eval()
    weights = {name: parameter.data for name, parameter in module.named_parameters()}
    for cut in cuts:
        name, _, part = cut.parameter.partition(".parts.")
        weight = weights[f"{name}.{part[2:]}"].chunk(2)[int(part[0])] if part else weights[name]
        weight.narrow(cut.dim, weight.shape[cut.dim] // 2, weight.shape[cut.dim] // 2).zero_()
    found = module.generate(heard(model_type), max_new_tokens=TOKENS, do_sample=False, num_beams=1, **given)
    return [tuple(row[-TOKENS:]) for row in found.tolist()]


def compiled(folder: Path, output: Path, **options: Any) -> Path:
    profile = board(buckets=["1x8"], budgets={"full": {}})
    return compile_bundle(model=folder, output=output, profile=profile, include="budgets", generate=True, **options)


@pytest.mark.parametrize("model_type", list(CLASSES))
def test_tokens_are_those_of_transformers_whole_and_cut(tmp_path: Path, model_type: str) -> None:
    folder = save(tmp_path / "m", model_type)
    source, small = open_source(folder), SMALL[model_type]
    path = compiled(folder, tmp_path / "b", submodels=[small])
    model, arrays = load(path), heard(model_type).numpy()
    (whole,) = (each.id for each in model.submodels if each.id != small)
    written = {}
    for cuts, submodel in ((source.spec.slices, small), ((), whole)):
        expected = written[submodel] = written_by_transformers(folder, model_type, cuts)
        assert len(set(expected)) > 1
        assert max(len(set(text)) for text in expected) > 1
        rows = model.generate(arrays, max_tokens=TOKENS, submodel=submodel).rows
        assert [row.tokens for row in rows] == expected
        assert {row.prompt_tokens for row in rows} == {PLACES[model_type]}
        for number, text in enumerate(expected):
            alone = model.generate(arrays[number : number + 1], max_tokens=TOKENS, submodel=submodel, draft="n-gram")
            assert alone.rows[0].tokens == text
    assert written[small] != written[whole]
    assert verify_bundle(path, against=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whisper of several languages, with a tokenizer."""
    languages = {"lang_to_id": {"<|en|>": 60, "<|de|>": 61}, "task_to_id": {"transcribe": 70, "translate": 71}}
    settings = {**languages, "is_multilingual": True, "no_timestamps_token_id": 90}
    made = save(tmp_path_factory.mktemp("whisper") / "m", "whisper", **settings)
    return save_tokenizer(made, word_tokenizer(96), {}).parent


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    return compiled(folder, folder.parent / "b")


@pytest.fixture(scope="module")
def model(bundle: Path) -> ElasticModel:
    return load(bundle)


def test_language_and_task_are_of_the_request(folder: Path, model: ElasticModel) -> None:
    arrays = heard("whisper").numpy()
    with pytest.raises(InputError, match=r"^decoder_prompt: this model begins with 2 and tokens of language and task"):
        model.generate(arrays)
    for language, number in (("en", 60), ("de", 61)):
        expected = written_by_transformers(folder, "whisper", language=language, task="transcribe")
        rows = model.generate(arrays, max_tokens=TOKENS, decoder_prompt=[2, number, 70, 90]).rows
        assert [row.tokens for row in rows] == expected
        assert all(row.text for row in rows)
    assert model.generate.token_text(5) != "5"


def test_what_the_folder_states_of_language_and_task_begins_the_text(tmp_path: Path, folder: Path) -> None:
    stated = Path(shutil.copytree(folder, tmp_path / "stated"))
    file = stated / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "language": "german", "task": "translate"}))
    model = load(compiled(stated, tmp_path / "b"))
    encoder = model.bundle.manifest.generation.encoder
    assert encoder.begin_ids == (2, 61, 71, 90)
    rows = model.generate(heard("whisper").numpy(), max_tokens=TOKENS).rows
    assert [row.tokens for row in rows] == written_by_transformers(stated, "whisper")


def test_a_wrong_weight_is_found(bundle: Path, folder: Path, tmp_path: Path) -> None:
    wrong, name = Path(shutil.copytree(bundle, tmp_path / "wrong")), "model.encoder.conv1.weight"
    weights = wrong / "weights.safetensors"
    raw = bytearray(weights.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    start, stop = json.loads(raw[8 : 8 + size])[name]["data_offsets"]
    stored = np.frombuffer(raw, np.float32, (stop - start) // 4, 8 + size + start)
    stored[5] += 0.5
    weights.write_bytes(raw)
    reseal(wrong)
    problems = {each.engine: each.problem for each in verify_bundle(wrong, against=folder).engines}
    (encoder,) = (engine for engine in problems if ".encoder@" in engine)
    assert "source_key_0" in (problems[encoder] or "")
    assert verify_bundle(bundle, against=folder)


def test_a_device_without_torch_writes(bundle: Path, model: ElasticModel, tmp_path: Path) -> None:
    arrays = heard("whisper").numpy()
    np.savez(tmp_path / "rows.npz", input_features=arrays)
    begin = ["--decoder-prompt", "2,60,70,90", "--max-tokens", "5", "--json"]
    command = ["generate", str(bundle), "--inputs", str(tmp_path / "rows.npz"), *begin]
    done = subprocess.run([sys.executable, "-c", DEVICE_PROGRAM, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = model.generate(arrays, max_tokens=5, decoder_prompt=[2, 60, 70, 90]).rows
    assert [tuple(row["tokens"]) for row in json.loads(done.stdout)["rows"]] == [row.tokens for row in rows]


def test_for_tensorrt_it_is_refused(folder: Path) -> None:
    request = CompileRequest(
        model=folder, output=folder.parent / "rt", profile="l4", buckets=[Bucket(1, 16)], generate=True
    )
    with pytest.raises(PlanError, match="cannot for tensorrt: its encoder reads an array; compile for onnxruntime"):
        resolve(request)


def test_what_is_no_such_array_is_refused(bundle: Path, model: ElasticModel, tmp_path: Path) -> None:
    arrays = heard("whisper").numpy()
    for given, said in (
        ("a text", r"^prompt: expected a numpy array of input_features, rows first$"),
        (arrays[:, :4], r"^input input_features: expected float32 \[batch, 8, 40\], got shape \[3, 4, 40\]$"),
        (arrays.astype(np.float64), r"^input input_features: expected a numpy array of float32, got float64$"),
    ):
        with pytest.raises(InputError, match=said):
            model.generate(given, decoder_prompt=[2])
    with pytest.raises(InputError, match=r"^decoder_prompt: token 1 is 96; expected a whole number from 0 to 95"):
        model.generate(arrays, decoder_prompt=[2, 96])
    with pytest.raises(InputError, match=r"^prompt: expected a numpy array of input_features"):
        model.generate(messages=[{"role": "user", "content": "a"}], decoder_prompt=[2])
    np.savez(tmp_path / "two.npz", a=arrays, b=arrays)
    said = error_of("generate", bundle, "--inputs", tmp_path / "two.npz")
    assert said.endswith("2 arrays; expected the one that the model's encoder reads")


def test_a_server_answers_whole_passes_and_refuses_to_write(bundle: Path) -> None:
    with serving(bundle) as running:
        for path, given in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": [{"role": "user"}]})):
            status, _, said = running.ask("POST", f"/v1/{path}", {"model": "b", **given})
            assert status == 400
            assert said["error"]["message"].startswith("model b: generates behind an array, input_features, which")
        rows = [{"name": "input_features", "datatype": "FP32", "shape": [1, 8, 40], "data": [0.5] * 320}]
        rows += [{"name": "decoder_input_ids", "datatype": "INT64", "shape": [1, 2], "data": [2, 5]}]
        status, _, said = running.ask("POST", "/v2/models/b/infer", {"inputs": rows})
        assert (status, said["outputs"][0]["name"]) == (200, "logits")
