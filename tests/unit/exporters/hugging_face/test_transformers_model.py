"""Classes of transformers: what they take, their tensors' names, their asserts and distances, and small models of
them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.errors import CheckpointError, ExportError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint, TensorHeader
from nestforge.exporters.hugging_face.class_inputs import depth
from nestforge.exporters.hugging_face.distances import biased_parts, look_up_distances
from nestforge.exporters.hugging_face.passes import go_in_order
from nestforge.exporters.hugging_face.small_model import smaller
from nestforge.exporters.hugging_face.tensors import distance_bucket, parameter_names
from nestforge.exporters.hugging_face.transformers_model import SplitFfn
from nestforge.exporters.source import open_source
from nestforge.exporters.trace import trace
from nestforge.exporters.universal import load_universal
from support.gated_decoders import make_decoder, save_decoder
from support.tiny_compile import board
from transformers import masking_utils
from transformers.models.t5.modeling_t5 import T5Attention


def test_an_export_of_any_length_looks_for_no_second_sequence_in_a_row(tmp_path: Path) -> None:
    """transformers' search ends in running sums of whole numbers, which TensorRT does not take."""
    universal = load_universal(open_source(save_decoder(tmp_path / "m")))
    search = masking_utils.find_packed_sequence_indices
    traced = trace(universal.module, universal.source.signature, Bucket(1, 8, min_sequence=1), 20)
    assert {node.op_type for node in traced.model.graph} & {"CumSum", "GatherND"} == set()
    assert masking_utils.find_packed_sequence_indices is search


def test_loops_over_sets_of_layer_types_have_one_order_in_every_process(tmp_path: Path) -> None:
    """Else the same model gave another graph with another seed of Python's hashes."""
    model = load_universal(open_source(save_decoder(tmp_path / "m", "gemma3n_text"))).module.model
    kinds = [str(number) for number in range(40)]
    made = vars(sys.modules[type(model).__module__])["set"](kinds)
    assert list(made) == sorted(kinds)
    assert made == set(kinds)
    model.unique_layer_types = set(kinds)
    go_in_order(model)
    assert list(model.unique_layer_types) == sorted(kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_views_of_their_file_or_widened_one_by_one(tmp_path: Path, dtype: torch.dtype) -> None:
    """Files of 16 bits are not mapped: their pages would stay beside what was made of them."""
    model = make_decoder("llama").to(dtype)
    model.save_pretrained(tmp_path / "m", max_shard_size="4KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    loaded = load_universal(open_source(tmp_path / "m")).parameters()
    wanted = dict(model.named_parameters())
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[name], parameter.float()) for name, parameter in wanted.items())
    assert (str(tmp_path / "m") in Path("/proc/self/maps").read_text()) == (dtype is torch.float32)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path, wrong: float) -> None:
    model = make_decoder("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 2] = wrong
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN or infinite values"):
        load_universal(open_source(tmp_path / "m"))


def test_it_is_the_packed_one_on_the_same_weights() -> None:
    packed = make_decoder("phi3").model.layers[0].mlp
    split, x = SplitFfn(packed), torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(split(x), packed(x))
    assert split.up_proj.weight.data_ptr() == packed.gate_up_proj.weight[32:].data_ptr()
    assert [tuple(parameter.shape) for parameter in split.parameters()] == [(32, 16), (32, 16), (16, 32)]


def holding(*names: str) -> Checkpoint:
    return Checkpoint(Path("m"), {}, dict.fromkeys(names, TensorHeader((1,), "F32", "model.safetensors")))


@pytest.mark.parametrize(
    ("tensor", "parameters", "parameter"),
    [
        ("embed.weight", {"embed.weight"}, "embed.weight"),
        ("bert.embed.weight", {"embed.weight"}, "embed.weight"),
        ("embed.weight", {"bert.embed.weight"}, "bert.embed.weight"),
        ("bert.embed.weight", {"bert.embed.weight"}, "bert.embed.weight"),
        ("head.weight", {"embed.weight"}, "head.weight"),
        ("LayerNorm.gamma", {"bert.LayerNorm.weight"}, "bert.LayerNorm.weight"),
        ("bert.LayerNorm.beta", {"LayerNorm.bias"}, "LayerNorm.bias"),
        ("old.weight", {"new.weight"}, "new.weight"),
    ],
)
def test_a_tensor_is_found_by_its_parameter(tensor: str, parameters: set[str], parameter: str) -> None:
    assert parameter_names(holding(tensor), parameters, "bert", [("old", "new")]) == {parameter: tensor}


def test_two_tensors_of_one_parameter_are_refused() -> None:
    message = r"^m: tensors 'a' and 'bert.a' are both parameter a; keep one of them$"
    with pytest.raises(CheckpointError, match=message):
        parameter_names(holding("a", "bert.a"), {"a"}, "bert")


@pytest.mark.parametrize("buckets", [16, 32])
def test_distances_fall_into_the_buckets_of_t5(buckets: int) -> None:
    found = [distance_bucket(distance, buckets, reach=128) for distance in range(4000)]
    oracle = T5Attention._relative_position_bucket(-torch.arange(4000), bidirectional=False, num_buckets=buckets)
    assert found == oracle.tolist()
    half, last = buckets // 2, buckets - 1
    assert (found[half - 1], found[half], found[127], found[128], max(found)) == (half - 1, half, last, last, last)


BART = {"encoder_layers": 3, "decoder_layers": 2}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (transformers.BartConfig(**BART), 5),
        (transformers.BartConfig(**BART, is_encoder_decoder=False), 3),
        (transformers.LongT5Config(num_layers=2, num_decoder_layers=1), 3),
        (transformers.BertConfig(num_hidden_layers=4), 4),
        (transformers.SwinConfig(depths=[2, 2, 6, 2]), 12),
        (transformers.CvtConfig(depth=[1, 2, 10]), 13),
        (
            transformers.DeformableDetrConfig(
                encoder_layers=2, decoder_layers=3, backbone_config=transformers.ResNetConfig(depths=[1, 2, 1, 1])
            ),
            10,
        ),
    ],
    ids=[
        "both sides",
        "one of them",
        "another key",
        "one side",
        "stages",
        "stages of another key",
        "a backbone before",
    ],
)
def test_an_answer_passes_through_the_layers_of_both_sides_of_stages_and_of_a_backbone(
    config: transformers.PreTrainedConfig, layers: int
) -> None:
    assert depth(SimpleNamespace(config=config)) == layers


SIZES = {"vocab_size": 64, "emb_dim": 16, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 24}


def test_xlm_asserts_lengths_in_passes_with_numbers_alone(tmp_path: Path) -> None:
    """It also makes a cache whatever is asked, which a part by itself is not given."""
    torch.manual_seed(0)
    model = transformers.XLMModel(transformers.XLMConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path / "m")
    assert [(axis.kind, axis.size) for axis in open_source(tmp_path / "m").spec.axes] == [("heads", 2), ("ffn", 64)]
    profile = board(budgets={"full": {}})
    levels = {"ffn": [1], "heads": [1]}
    folder = compile_bundle(
        model=tmp_path / "m", output=tmp_path / "out", profile=profile, buckets=["2x4"], levels=levels
    )
    assert [engine.submodel for engine in open_bundle(folder).manifest.engines] == ["heads2-ffn64"]
    with pytest.raises(AssertionError):
        model(torch.ones((2, 4), dtype=torch.int64), lengths=torch.tensor([4, 5]))


@pytest.mark.parametrize("model_type", ["t5", "umt5"])  # a function of the class, and one of the layer
@pytest.mark.parametrize(("buckets", "farthest"), [(8, 20), (32, 128), (32, 17)])
def test_buckets_are_those_of_transformers_on_both_sides(model_type: str, buckets: int, farthest: int) -> None:
    sizes = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": farthest}
    model, own = made(model_type, **sizes), made(model_type, **sizes)
    places = torch.arange(-700, 701)
    look_up_distances(model)
    for part, computing in zip(biased_parts(model), biased_parts(own), strict=True):
        expected = computing.compute_bias(1, 1401, past_seen_tokens=700)  # of distances from -700 to 700
        buckets_of = part._relative_position_bucket(places)
        found = computing.relative_attention_bias(buckets_of).T[None, :, None]
        assert torch.equal(found, expected)
    assert len(biased_parts(model)) == (2 if model_type == "t5" else 4)


def test_a_table_of_too_many_distances_is_refused() -> None:
    with pytest.raises(ExportError, match="relative_attention_max_distance: expected at most 65536, got 65537"):
        look_up_distances(made("t5", relative_attention_max_distance=65537))


def made(model_type: str, **sizes: int) -> transformers.PreTrainedModel:
    name = {"t5": "T5ForConditionalGeneration", "umt5": "UMT5ForConditionalGeneration"}[model_type]
    small = {"d_model": 8, "d_kv": 8, "d_ff": 8, "num_heads": 2, "num_layers": 2, "vocab_size": 8, **sizes}
    model: transformers.PreTrainedModel = getattr(transformers, name)(
        transformers.AutoConfig.for_model(model_type, **small)
    )
    return model.eval().requires_grad_(False)


_WINDOW, _FULL, _CONV = "sliding_attention", "full_attention", "conv"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.BertConfig(), {"num_hidden_layers": 2}),
        (
            transformers.Lfm2Config(num_hidden_layers=4, layer_types=[_CONV, _CONV, _FULL, _CONV]),
            {"num_hidden_layers": 3, "layer_types": [_CONV, _FULL, _CONV]},
        ),
        # By their position, in periods.
        (
            transformers.JambaConfig(),
            {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1},
        ),
        (transformers.Qwen2MoeConfig(decoder_sparse_step=4), {"num_hidden_layers": 2, "decoder_sparse_step": 2}),
        # The first ten layers are sparse, the last fifteen read keys and values of others of their type.
        (
            transformers.Gemma3nTextConfig(),
            {
                "num_hidden_layers": 6,
                "layer_types": [_WINDOW, _FULL] * 3,
                "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
                "num_kv_shared_layers": 2,
            },
        ),
        # Sizes that a configuration leaves out, as classes that need none have them.
        (
            transformers.DeepseekV2Config(num_experts_per_tok=None),
            {"num_experts_per_tok": 2, "n_routed_experts": 4},
        ),
        (transformers.MinistralConfig(), {"head_dim": 8, "num_key_value_heads": 2}),
        (transformers.NemotronConfig(num_key_value_heads=None), {"num_key_value_heads": 4}),
        # Names of stages are no kinds.
        (transformers.FocalNetConfig(out_features=["stage1", "stage4"]), {"depths": [1, 1, 1, 1]}),
    ],
)
def test_layers(config: Any, expected: dict[str, Any]) -> None:
    found = smaller(config)
    assert {name: found[name] for name in expected} == expected


def test_layers_that_read_the_keys_of_others_find_them() -> None:
    stated = transformers.Gemma3nTextConfig()
    small = transformers.Gemma3nTextConfig(**{**stated.to_dict(), **smaller(stated)})
    with torch.device("meta"):
        layers = transformers.Gemma3nForCausalLM(small).model.layers
    assert [layer.self_attn.is_kv_shared_layer for layer in layers] == [False] * 4 + [True] * 2


def test_changes_of_layers_go_with_the_layers_that_stay() -> None:
    found = smaller(transformers.EmbeddingGemma2TextConfig())
    layers = found["layer_types"]
    assert found["num_hidden_layers"] == len(layers)
    assert set(found["per_layer_config"]) == {number for number, kind in enumerate(layers) if kind == _FULL}


def test_stages_of_a_part_are_its_own_where_it_has_fewer_layers() -> None:
    config = transformers.DepthProConfig()
    small = transformers.DepthProConfig(**smaller(config))
    assert small.image_model_config.num_hidden_layers == 2


def test_as_many_stages_stay() -> None:
    found = smaller(transformers.RTDetrConfig())
    assert found["backbone_config"]["out_features"] == ["stage2", "stage3", "stage4"]
    assert "encode_proj_layers" not in found
