"""Gated decoders from their folders: axes, parameters, loading, widths per layer, what a narrowed module computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.manifest import Ranking
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.errors import CheckpointError
from nestforge.exporters.checkpoints.checkpoint import Checkpoint
from nestforge.exporters.families.decoder_types import LAYOUTS as KINDS
from nestforge.exporters.families.gated_decoder import FAMILY
from nestforge.exporters.families.gemma3n import Gemma3nParts
from nestforge.exporters.published_slices import read_slice
from nestforge.exporters.source import ModelSource, open_source
from nestforge.exporters.universal import load_universal, rank, taylor_scores
from nestforge.workload import macs
from safetensors.torch import load_file, save_file
from support.gated_decoders import OWN, TINY, make_decoder, narrowed, save_decoder
from support.hugging_face_classes import rename
from support.tiny_compile import BUCKET, assert_tensorrt_takes, board, builder_in, template_of
from support.tiny_models import edit_config

IDS = torch.randint(3, 48, (2, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("decoder") / "llama")


@pytest.mark.parametrize("model_type", OWN)
def test_every_layout_loads_and_config_json_alone_tells_its_parameters(tmp_path: Path, model_type: str) -> None:
    folder = save_decoder(tmp_path / "m", model_type)
    universal = load_universal(open_source(folder))
    (logits,) = universal.module(IDS)
    torch.testing.assert_close(logits, make_decoder(model_type)(input_ids=IDS).logits)
    (folder / "model.safetensors").unlink()
    untrained = open_source(folder)
    assert dict(untrained.shapes) == dict(universal.source.shapes)
    assert untrained.spec == universal.spec


@pytest.mark.parametrize("model_type", OWN)
def test_a_narrowed_module_is_one_really_made_narrow(tmp_path: Path, model_type: str) -> None:
    """For the sparse layers of Gemma 3n too, whose cutoff is then taken over the neurons that are left."""
    universal = load_universal(open_source(save_decoder(tmp_path / "m", model_type)))
    widths = [8, 16, 24][: len(universal.spec.axes)]
    widths[1] = min(widths[1], universal.spec.axes[1].size)
    submodel = universal.spec.from_kinds({"ffn": widths})
    (found,) = universal.narrow(submodel)(IDS)
    expected = narrowed(make_decoder(model_type), widths)(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("model_type", OWN)
def test_what_pads_a_text_on_its_right_changes_nothing_before_it(model_type: str) -> None:
    model, other = make_decoder(model_type), IDS.clone()
    other[:, 5:] = 0
    left, right = (model(input_ids=ids, use_cache=False).logits[:, :5] for ids in (IDS, other))
    torch.testing.assert_close(left, right)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text"])
def test_widths_per_layer_as_a_list(tmp_path: Path, model_type: str) -> None:
    """transformers' own classes refuse a list; ours are made so that weights of different widths load."""
    expected = narrowed(make_decoder(model_type), [8, 24])
    folder = save_decoder(tmp_path / "m", model_type)
    stored = {name: tensor for name, tensor in expected.state_dict().items() if name != "lm_head.weight"}
    if not expected.config.tie_word_embeddings:
        stored["lm_head.weight"] = expected.lm_head.weight.data
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    universal = load_universal(open_source(edit_config(folder, intermediate_size=[8, 24])))
    assert universal.spec.universal().id == "ffn8x1_24x1"
    assert type(universal.module.model).__name__ == type(expected).__name__
    torch.testing.assert_close(universal.module(IDS)[0], expected(input_ids=IDS).logits)


def test_gate_and_up_of_one_tensor_are_parameters_of_their_own(tmp_path: Path) -> None:
    """Files hold gate above up; a prefix of neurons is a prefix of each."""
    folder = save_decoder(tmp_path / "m", "phi3")
    universal = load_universal(open_source(folder))
    at, stored = "model.layers.1.mlp", load_file(folder / "model.safetensors")
    packed = stored[f"{at}.gate_up_proj.weight"]
    assert torch.equal(universal.parameters()[f"{at}.gate_proj.weight"], packed[:32])
    assert torch.equal(universal.parameters()[f"{at}.up_proj.weight"], packed[32:])
    assert [cut.parameter for cut in universal.spec.slices if cut.axis == "layers.1.ffn"] == [
        f"{at}.gate_proj.weight",
        f"{at}.up_proj.weight",
        f"{at}.down_proj.weight",
    ]


@pytest.mark.parametrize("bare", [False, True], ids=["", "without the base model's prefix"])
def test_a_published_slice_of_a_packed_ffn(tmp_path: Path, bare: bool) -> None:
    """Its packed tensor is no prefix of the model's; each of its halves is."""
    folder, sliced = save_decoder(tmp_path / "m", "phi3"), tmp_path / "slice"
    narrowed(make_decoder("phi3"), [8, 24]).save_pretrained(sliced)
    edit_config(sliced, intermediate_size=[8, 24])
    if bare:
        rename(sliced, lambda name: name.removeprefix("model."))
    source = open_source(folder)
    assert read_slice(source, sliced).id == "ffn8x1_24x1"
    tensors = load_file(sliced / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.mlp.gate_up_proj.weight"))
    tensors[name] = tensors[name].roll(1, 0)
    save_file(tensors, sliced / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.gate_proj.weight is not the first part \(layers.1.ffn 24"):
        read_slice(source, sliced)


@pytest.mark.parametrize("model_type", ["llama", "gemma3n_text"])
def test_neurons_may_be_ordered_without_changing_the_function(tmp_path: Path, model_type: str) -> None:
    """Gate, up and down move together; a cutoff from mean and deviation does not see the order."""
    universal = load_universal(open_source(save_decoder(tmp_path / "m", model_type)))
    (before,), gate = universal.module(IDS), universal.parameters()["model.layers.0.mlp.gate_proj.weight"].clone()
    rank(universal, taylor_scores(universal, [(IDS,)]), "taylor")
    torch.testing.assert_close(universal.module(IDS)[0], before, rtol=0, atol=1e-5)
    assert not torch.equal(universal.parameters()["model.layers.0.mlp.gate_proj.weight"], gate)


_KEYS = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "max_position_embeddings"),
)
_TIED = {"tie_word_embeddings": True}
_LONGROPE = {
    "original_max_position_embeddings": 4096,
    "sliding_window": 262144,
    "rope_scaling": {"type": "longrope"},
}
# Parameters that the publishers' own pages state, from the configurations in the files they publish: _KEYS, and others.
PUBLISHED: dict[str, tuple[tuple[str | int, ...], dict[str, Any], int]] = {
    "Llama-2-7b": (("llama", 32000, 4096, 32, 32, 32, 11008, 4096), {}, 6_738_415_616),
    "Llama-3.2-1B": (
        ("llama", 128256, 2048, 16, 32, 8, 8192, 131072),
        {**_TIED, "rope_scaling": {"rope_type": "llama3"}},
        1_235_814_400,
    ),
    "Mistral-7B-v0.1": (("mistral", 32000, 4096, 32, 32, 8, 14336, 32768), {"sliding_window": 4096}, 7_241_732_096),
    "Qwen2.5-0.5B": (("qwen2", 151936, 896, 24, 14, 2, 4864, 32768), _TIED, 494_032_768),
    "Qwen3-0.6B": (("qwen3", 151936, 1024, 28, 16, 8, 3072, 40960), {**_TIED, "head_dim": 128}, 596_049_920),
    "Phi-3-mini-128k": (("phi3", 32064, 3072, 32, 32, 32, 8192, 131072), _LONGROPE, 3_821_079_552),
    "gemma-2-2b": (("gemma2", 256000, 2304, 26, 8, 4, 9216, 8192), {"head_dim": 256}, 2_614_341_888),
    "gemma-3-1b": (("gemma3_text", 262144, 1152, 26, 4, 1, 6912, 32768), {"head_dim": 256}, 999_885_952),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name: str) -> None:
    values, others, parameters = PUBLISHED[name]
    generating = next(each for each in KINDS[str(values[0])].classes if each.endswith("ForCausalLM"))
    source = untrained({**dict(zip(_KEYS, values, strict=True)), **others, "architectures": [generating]})
    assert source.parameters(source.spec.universal()) == parameters


def untrained(config: dict[str, Any]) -> ModelSource:
    checkpoint = Checkpoint(Path("m"), config, {}, missing="not trained")
    return ModelSource(checkpoint, FAMILY, FAMILY.read(checkpoint))


def test_multiply_adds_by_hand(llama: Path) -> None:
    """Grouped queries make fewer keys and values; gate, up and down all shrink; the head never does."""
    source, tokens = open_source(llama), 2 * 8
    queries, keys, scores = 16 * 16, 2 * 16 * 8, 2 * 8 * 16  # per token; scores of 8 keys, and their context
    layer = queries + keys + scores + 16 * 16 + 3 * 16 * 24
    assert macs(source.workload(source.spec.parse("ffn24"), Bucket(2, 8))) == tokens * (2 * layer + 16 * 48)


def test_soft_caps_and_sparse_layers_cost_elementwise_work(tmp_path: Path) -> None:
    names = {}
    for model_type in ("gemma2", "gemma3n_text"):
        source = open_source(save_decoder(tmp_path / model_type, model_type))
        names[model_type] = {op.name for op in source.workload(source.spec.universal(), Bucket(1, 4))}
    assert {"layers.0.attention.cap", "lm_head.cap"} <= names["gemma2"]
    assert "layers.0.ffn.cutoff" in names["gemma3n_text"]
    assert "layers.1.ffn.cutoff" not in names["gemma3n_text"]
    assert "layers.1.attention.key" in names["gemma3n_text"]
    assert "layers.2.attention.key" not in names["gemma3n_text"]  # reads those of layer 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"intermediate_size": 16384}, (True, {"ffn": (0.5, 1.0)})),  # as E4B is
        ({"intermediate_size": 8192}, (True, {"ffn": (1.0,)})),  # as E2B is: nothing smaller was trained
        ({"intermediate_size": [8192, 16384, 8192]}, (True, {"ffn": (1.0,)})),
        ({"nested": False}, (False, None)),
        ({"granularities": {"ffn": [0.25, 1]}}, (True, {"ffn": (0.25, 1.0)})),
    ],
)
def test_gemma_3n_is_nested_unless_its_config_says_otherwise(changes: dict[str, Any], expected: Any) -> None:
    config = make_decoder("gemma3n_text").config.to_dict() | {"architectures": ["Gemma3nForCausalLM"]}
    spec = untrained({**config, **changes}).spec
    assert (spec.trained_nested, spec.granularities) == expected
    assert spec.jointly_normalised == {"layers.0.ffn"}


PROFILE = board(budgets={"full": {}})
_LONGER = {"rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 10}
_LLAMA3 = {**_LONGER, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# One layer where all are alike, for speed; kinds of rotary positions shared out; gemma3n_text has its own test below.
LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1, "rope_parameters": _LLAMA3},
    "granite": {"num_hidden_layers": 1},
    "mistral": {"num_hidden_layers": 1},
    "qwen3": {"num_hidden_layers": 1, "rope_parameters": {**_LONGER, "rope_type": "yarn"}},
    "phi3": {
        "num_hidden_layers": 1,
        "original_max_position_embeddings": 10,
        "rope_parameters": {"rope_type": "longrope", "short_factor": [1.5], "long_factor": [4.0]},
    },
    "gemma": {"num_hidden_layers": 1, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e3, "factor": 4.0}},
    "qwen2": {"num_hidden_layers": 1, "max_window_layers": 0},
    "gemma2": {},
    "gemma3_text": {},
}


def test_every_layout_is_tested() -> None:
    assert {*LAYOUTS, "gemma3n_text"} == set(FAMILY.model_types)


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_every_layout_is_sliced_and_equals_pytorch(tmp_path: Path, model_type: str) -> None:
    universal = load_universal(open_source(save_decoder(tmp_path / "m", model_type, **LAYOUTS[model_type])))
    template = template_of(universal)
    assert template.slice_problem is None
    # A tied head is one tensor, under the name that the module gives it first.
    assert "model.embed_tokens.weight" in template.weights
    assert ("lm_head.weight" in template.weights) is not universal.module.model.config.tie_word_embeddings
    builder = builder_in(tmp_path / "bundle", universal, template, PROFILE)
    for widths in ([8, 16], [32, 32]):
        submodel = universal.spec.from_kinds({"ffn": widths[: len(universal.spec.axes)]})
        entry = builder.build(submodel, BUCKET)
        assert (entry.emitted, entry.slice_problem) == ("sliced", None)
        assert entry.parity is not None
    assert_tensorrt_takes(tmp_path / "bundle")


def test_gemma_3n_compiles_and_keeps_its_order(tmp_path: Path) -> None:
    """One layer is sparse: its slice is proven with that layer narrowed on both sides."""
    folder = edit_config(
        save_decoder(tmp_path / "m", "gemma3n_text"),
        granularities={"ffn": [0.5, 1]},
    )
    manifest = open_bundle(compile_bundle(folder, PROFILE, tmp_path / "b")).manifest
    assert {engine.id: engine.emitted for engine in manifest.engines} == {
        f"ffn16x1_8x1_16x1@{BUCKET.label}": "sliced",
        f"ffn32x1_16x1_32x1@{BUCKET.label}": "sliced",
    }
    assert manifest.ranking == Ranking("none")
    (proof,) = [proof for proof in manifest.proofs if proof.suite == "slice"]
    assert proof.subject == "ffn16x1_8x1_16x1"
    assert 0 <= proof.worst <= proof.limit
    assert_tensorrt_takes(tmp_path / "b")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_decoder(tmp_path / "m", num_hidden_layers=2)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as failure:
        open_source(folder).spec  # noqa: B018  (a property that reads the folder)
    message = str(failure.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"intermediate_size": [32]}, "intermediate_size: expected 2 numbers, one per layer, got 1"),
        ({"intermediate_size": None}, "intermediate_size: expected whole numbers of at least 1, got None"),
        (
            {"architectures": ["MistralModel"]},
            "architecture 'MistralModel' is not supported; supported are LlamaModel, LlamaForCausalLM, "
            "LlamaForSequenceClassification, LlamaForTokenClassification, LlamaForQuestionAnswering",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most 1024, got 1000000000"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 4 heads cannot share 3 pairs of keys and values"),
        ({"hidden_size": "16"}, "hidden_size: expected a whole number, got str '16'"),
        ({"use_bidirectional_attention": True}, "positions that see later ones are not supported"),
        ({"is_causal": False}, "is_causal: positions that see later ones are not supported"),
        ({"nested": "yes"}, "nested: expected true or false"),
    ],
)
def test_configurations(folder: Path, changes: dict[str, Any], expected: str) -> None:
    message = refusal(edit_config(folder, **changes))
    assert message.startswith(f"{folder / 'config.json'}: ")
    assert expected in message


def test_constants_of_old_files_are_passed_over(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "inv_freq" not in " ".join(load_universal(open_source(folder)).parameters())


def test_what_transformers_itself_refuses_is_one_line(folder: Path) -> None:
    edit_config(folder, hidden_act="no such function")
    with pytest.raises(CheckpointError, match="transformers cannot load it") as failure:
        load_universal(open_source(folder))
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers: expected fewer than the 3 layers, got 3"),
        (
            {"activation_sparsity_pattern": [0.5]},
            "activation_sparsity_pattern: expected 3 numbers, one per layer, got 1",
        ),
        ({"intermediate_size": [32, 16]}, "intermediate_size: expected 3 numbers, one per layer, got 2"),
    ],
)
def test_gemma_3n(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    folder = edit_config(save_decoder(tmp_path / "m", "gemma3n_text"), **changes)
    assert refusal(folder) == f"{folder / 'config.json'}: {expected}"


HIDDEN, LAYERS = TINY["hidden_size"], 3
PARTS = Gemma3nParts(
    streams=2, layer_vocabulary=40, layer_hidden=8, laurel_rank=4, shared_layers=1, sparse=(True, False, False)
)


def test_multiply_adds_of_gemma_3n_by_hand() -> None:
    tokens = 2 * 5
    bucket = Bucket(2, 5)
    assert macs(PARTS.first_ops(bucket, HIDDEN, LAYERS)) == tokens * HIDDEN * (LAYERS * 8 + HIDDEN)
    assert macs(PARTS.last_ops(bucket, HIDDEN)) == tokens * HIDDEN * HIDDEN
    routers, coefficients, predicted = 2 * HIDDEN * 2, 2 * 4 + 2 * 2, 2 * 2 * HIDDEN
    laurel, inputs = 2 * HIDDEN * 4, 2 * HIDDEN * 8
    assert macs(PARTS.layer_ops("layers.0", bucket, HIDDEN)) == tokens * (
        routers + coefficients + predicted + laurel + inputs
    )


def test_a_copy_of_a_tied_head_is_no_parameter(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "m", "gemma")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "lm_head.weight" not in load_universal(open_source(folder)).parameters()
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight .* a copy of a tied weight that differs"):
        load_universal(open_source(folder))
