"""Model folders: their family, their parts with engines of their own, and the tensors of their tasks."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.generation_entry import CACHED, CachedLayer
from nestforge.errors import CheckpointError
from nestforge.exporters.adapter_folder import CONFIG_NAME, WEIGHTS_NAME
from nestforge.exporters.family import families, preset_checkpoint, presets
from nestforge.exporters.parts import CachedSpec, Part
from nestforge.exporters.source import ModelSource, WeightBytes, expected_encodings, open_source, weight_bytes
from nestforge.exporters.tasks import with_tasks
from nestforge.exporters.universal import load_universal
from nestforge.profiles.precision import Encoding, Precision
from safetensors.torch import load_file, save_file
from support.gated_decoders import save_decoder
from support.tiny_matlm import save_tiny_matlm

INT8_ON_CPU = (".int8", ".int8-scale", ".int8-zero")


def test_a_processor_widens_one_stored_half_after_the_other() -> None:
    small, large = (weight_bytes(shape, (".fp16",), "onnxruntime") for shape in ((8, 4), (8, 16)))
    assert (small, large) == (WeightBytes(64, widened=128), WeightBytes(256, widened=512))
    assert (small + large).held == (large + small).held == 64 + 256 + 512
    assert weight_bytes((8, 4), (".fp16",), "tensorrt") == WeightBytes(64)
    assert weight_bytes((8, 4), ("", ".fp16"), "onnxruntime") == WeightBytes(192, widened=128)


def test_integers_and_floats_are_held_as_they_are_stored() -> None:
    assert weight_bytes((8, 4), ("",), "onnxruntime") == WeightBytes(128)
    assert weight_bytes((8, 4), INT8_ON_CPU, "onnxruntime") == WeightBytes(32 + 5 * 8)
    assert weight_bytes((8, 4), (), "tensorrt") == WeightBytes(0), "what no engine reads is not stored"


@pytest.mark.parametrize(
    ("precision", "backend", "shape", "is_table", "is_wider", "expected"),
    [
        ("fp32", "onnxruntime", (64, 64), False, False, ("",)),
        ("fp16", "tensorrt", (64,), False, False, (".fp16",)),
        ("bf16", "tensorrt", (64, 64), True, False, (".bf16",)),
        ("int8", "onnxruntime", (16, 32), False, False, INT8_ON_CPU),
        ("int8", "tensorrt", (16, 32), False, False, (".int8", ".int8-scale")),
        ("int8-dynamic", "onnxruntime", (15, 32), False, False, ("",)),
        ("int8-dynamic", "onnxruntime", (16, 31), False, False, ("",)),
        ("int8-dynamic", "onnxruntime", (64,), False, False, ("",)),
        ("int8-dynamic", "onnxruntime", (16, 3, 64, 64), False, False, ("",)),
        ("int8-dynamic", "onnxruntime", (8, 16, 32), False, False, INT8_ON_CPU),
        ("int8", "onnxruntime", (64, 64), True, False, (".int8", ".int8-scale")),
        ("int8", "tensorrt", (64, 64), True, False, ("",)),
        ("int4", "onnxruntime", (64, 64), False, False, (".int4", ".int4-scale")),
        ("int4", "onnxruntime", (64, 64), False, True, INT8_ON_CPU),
        ("int4", "onnxruntime", (64, 64), True, False, (".int8", ".int8-scale")),
    ],
)
def test_what_headers_let_expect(
    precision: Precision,
    backend: str,
    shape: tuple[int, ...],
    is_table: bool,
    is_wider: bool,
    expected: tuple[Encoding, ...],
) -> None:
    assert expected_encodings(precision, backend, shape, is_table, is_wider) == expected


def test_a_name_stands_for_one_model_of_one_family() -> None:
    counts = Counter(name for family in families() for name in family.presets)
    assert counts.most_common(1)[0][1] == 1
    assert presets().keys() == counts.keys()
    assert {"matlm-78m", "matvit-b16", "sparse-mixer-base", "bert-base"} <= presets().keys()


@pytest.mark.parametrize("name", presets())
def test_every_preset_can_be_described(name: str) -> None:
    source = open_source(f"preset:{name}")
    universal = source.spec.universal()
    longest = source.signature.max_sequence or 1
    (bucket,) = source.signature.buckets([Bucket(1, longest)], [])
    assert source.spec.parse(universal.id) == universal
    assert source.parameters(universal) > 1_000_000
    assert source.workload(universal, bucket)


def test_presets_need_no_torch() -> None:
    """One of each kind of model."""
    program = """
import sys
sys.modules["torch"] = None
from nestforge.bucket import Bucket
from nestforge.exporters.source import open_source
for name in sys.argv[1:]:
    source = open_source(f"preset:{name}")
    universal, bucket = source.spec.universal(), Bucket(1, source.signature.max_sequence or 1)
    assert source.workload(universal, bucket) and source.parameters(universal)
    for ask in (source.variants, source.metadata, source.routes):
        ask(universal, bucket)
"""
    kinds = {preset_checkpoint(name).config["model_type"]: name for name in presets()}
    assert len(kinds) > 5
    subprocess.run([sys.executable, "-c", program, *kinds.values()], check=True)


def test_an_unknown_name_has_a_nearest_one() -> None:
    with pytest.raises(
        CheckpointError, match=r"^preset:sparse-mixr-base: no preset of this name; did you mean 'sparse-"
    ):
        preset_checkpoint("sparse-mixr-base")


def test_a_preset_has_no_weights() -> None:
    checkpoint = preset_checkpoint("sparse-mixer-base")
    assert (checkpoint.name, checkpoint.has_weights, checkpoint.tensors) == ("preset:sparse-mixer-base", False, {})
    with pytest.raises(
        CheckpointError, match=r"^preset:sparse-mixer-base: a preset has no weights; `nestforge inspect`"
    ):
        checkpoint.require_weights()


def test_a_part_has_the_bucket_of_the_profile_or_its_own() -> None:
    part = Part("head", (), (), lambda *_: [], lambda module: module)
    own = Part("head", (), (), lambda *_: [], lambda module: module, bucket=Bucket(64, 512, 1, 1))
    assert part.at(Bucket(1, 8)) == Bucket(1, 8)
    assert own.at(Bucket(1, 8)) == Bucket(64, 512, 1, 1)


def form(size: int = 8, positions: int = 40, problem: str | None = None) -> CachedSpec:
    layers = (CachedLayer(2, size),) * 2
    return CachedSpec(48, positions, layers, lambda module: module, lambda module: module, family_problem=problem)


def test_engines_take_rows_of_one_token_and_as_many_tokens_as_the_model_has_positions() -> None:
    assert form().bucket == Bucket(64, 40, 1, 1)
    assert form(positions=4096).bucket == Bucket(64, 512, 1, 1)


def test_the_interface_has_two_tensors_a_layer_and_names_what_the_caller_chooses() -> None:
    (part,) = form().parts(lambda *_: [])
    assert part.name == CACHED
    assert [spec.name for spec in part.inputs] == [
        *("input_ids", "position_ids", "logits_at"),
        *("past_key_0", "past_value_0", "past_key_1", "past_value_1"),
    ]
    assert part.inputs[3].dims == ("batch", 2, "capacity", 8)
    assert part.outputs[0].dims == ("batch", "answers", 48)
    assert part.outputs[0].declared(Bucket(64, 40, 1, 1)) == ("batch", "answers", 48)
    assert [spec.name for spec in part.outputs[1:3]] == ["present_key_0", "present_value_0"]


def test_costs_are_those_of_one_new_token() -> None:
    asked: list[Bucket] = []
    (part,) = form().parts(lambda _, bucket: asked.append(bucket) or [])
    part.workload(None, Bucket(64, 40, 1, 1))
    assert asked == [Bucket(1, 1)]


def test_a_head_that_the_operator_cannot_read_is_a_problem() -> None:
    assert form().problem is None
    assert form(size=12).problem == "heads of size 12; expected a multiple of 8"
    assert form(size=12, problem="of the family").problem == "of the family"


def source(folder: Path, **overrides: Any) -> ModelSource:
    return open_source(save_decoder(folder, **overrides))


def test_families_say_what_they_cannot(tmp_path: Path) -> None:
    llama = source(tmp_path / "llama", head_dim=8).architecture.cached
    assert (llama.problem, llama.layers) == (None, (CachedLayer(2, 8),) * 2)
    gemma3n = source(tmp_path / "gemma3n", model_type="gemma3n_text", head_dim=8).architecture.cached
    assert (gemma3n.problem, len(gemma3n.layers)) == (None, 2), "the third layer reads the keys of the second"


@pytest.mark.parametrize(("options", "heads"), [({}, [4, 4, 4]), ({"nested_heads": True}, [4, 2, 1])])
def test_the_cache_of_a_submodel_has_its_own_heads(tmp_path: Path, options: dict[str, Any], heads: list[int]) -> None:
    matlm = open_source(save_tiny_matlm(tmp_path / "matlm", **options))
    cached = matlm.architecture.cached
    assert cached.problem is None
    assert {layer.heads for layer in cached.layers} == {4}
    kept = {axis.name: heads[int(axis.name.split(".")[1])] for axis in matlm.spec.axes if axis.kind == "heads"}
    assert [layer.heads for layer in cached.at(matlm.spec.submodel(kept)).layers] == heads


def test_only_a_source_that_generates_has_the_part(tmp_path: Path) -> None:
    from dataclasses import replace

    quiet = source(tmp_path / "llama", head_dim=8)
    assert not quiet.parts
    assert list(replace(quiet, generates=True).parts) == [CACHED]


@pytest.mark.parametrize("head", ["LlamaModel", "LlamaForSequenceClassification"])
def test_a_model_without_logits_of_tokens_does_not_generate(tmp_path: Path, head: str) -> None:
    from support.tiny_models import edit_config

    folder = edit_config(save_decoder(tmp_path, head_dim=8), architectures=[head])
    (folder / "model.safetensors").unlink()
    assert open_source(folder).architecture.cached is None


LLAMA = Path(__file__).parents[2] / "golden" / "peft" / "llama"


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_tied_parameter_that_was_trained_whole_is_refused(tmp_path: Path, is_tied: bool) -> None:
    base, adapter = (Path(shutil.copytree(LLAMA / name, tmp_path / name)) for name in ("base", "b"))
    config = base / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": is_tied}))
    weights = load_file(base / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    weights.pop("lm_head.weight", None)
    save_file(weights if is_tied else {**weights, "lm_head.weight": table + 1}, base / "model.safetensors")
    config = adapter / CONFIG_NAME
    config.write_text(json.dumps({**json.loads(config.read_text()), "modules_to_save": ["embed_tokens"]}))
    pairs = load_file(adapter / WEIGHTS_NAME)
    saved = {**pairs, "base_model.model.model.embed_tokens.weight": torch.ones_like(table)}
    save_file(saved, adapter / WEIGHTS_NAME)
    source, tasks = with_tasks(open_source(base), {"b": adapter})
    assert "model.embed_tokens.weight" in tasks["b"].tensors
    if not is_tied:
        load_universal(source)
        return
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight is tied to lm_head\.weight, and"):
        load_universal(source)


def test_a_pair_beside_a_layer_in_parts_is_one_beside_each(tmp_path: Path) -> None:
    import transformers

    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id"), 1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.ModernBertConfig(**sizes, **tokens, vocab_size=40, max_position_embeddings=16)
    transformers.ModernBertModel(config).save_pretrained(tmp_path / "m")
    (tmp_path / "a").mkdir()
    stated = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["Wi"]}
    (tmp_path / "a" / CONFIG_NAME).write_text(json.dumps(stated))
    down, up = torch.randn(2, 16), torch.randn(48, 2)
    at = "base_model.model.layers.0.mlp.Wi"
    save_file({f"{at}.lora_A.weight": down, f"{at}.lora_B.weight": up}, tmp_path / "a" / WEIGHTS_NAME)
    source, tasks = with_tasks(open_source(tmp_path / "m"), {"a": tmp_path / "a"})
    for number, rows in enumerate(up.chunk(2)):
        part = f"layers.0.mlp.Wi.parts.{number}"
        np.testing.assert_array_equal(tasks["a"].tensors[f"{part}.lora_A.weight"], down)
        np.testing.assert_array_equal(tasks["a"].tensors[f"{part}.lora_B.weight"], rows)
    assert source.architecture.parameter_shapes["layers.0.mlp.Wi.parts.1.lora_B.weight"] == (24, 2)
