"""Dense equivalence: at r = 1 a converted encoder is transformers' own, of every class that is read."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import pytest
import torch
from nestforge.compiler.convert_coda import convert_coda
from nestforge.compiler.parity.reading import in_float64
from nestforge.errors import CheckpointError, InputError, PlanError, UnsupportedModelError
from nestforge.exporters.checkpoints.checkpoint import open_checkpoint
from nestforge.exporters.families.coda.convert import Conversion, converted
from nestforge.exporters.families.coda.encoder_decoder import load_model as load_pair
from nestforge.exporters.families.coda.model import CodaEncoder, load_model
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.profiles.nest_request import ConversionSettings
from support.tiny_coda import T5_SETTINGS, save_small_t5
from support.tiny_models import V1_1, add_pooling, cut_ffn, edit_config, save_t5, save_tiny_encoder, save_tiny_vit

# As every published T5 has them.
DISTANCES = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
SETTINGS = ConversionSettings(adapter_size=4, reduction=2, seed=3)


def save(folder: Path, kind: str) -> Path:
    """A folder of each class that is read, and of what stands behind some of them."""
    if kind.startswith("t5"):
        name = "T5ForConditionalGeneration" if "decoder" in kind else "T5EncoderModel"
        return save_t5(folder, name, text=False, **DISTANCES, **(V1_1 if "v1.1" in kind else {}))
    if kind.startswith(("vit", "deit")):
        task = "ForImageClassification" if "classifier" in kind else "Model"
        more = {"qkv_bias": False, "image_size": [8, 12]} if "no bias" in kind else {}
        return save_tiny_vit(folder, kind.partition(" ")[0], task, **more)
    task = "ForSequenceClassification" if "classifier" in kind else "Model"
    return save_tiny_encoder(folder, kind.partition(" ")[0], task, num_hidden_layers=2, hidden_act="gelu")


KINDS = {
    "t5": ((), 6),
    "t5 v1.1 with a decoder": (("decoder",), 6),
    "vit": (("pooler",), 5),
    "vit, no bias, classifier": (("head",), 7),
    "deit": (("pooler",), 6),
    "bert": (("pooler",), 6),
    "bert classifier": (("pooler", "head"), 6),
    "roberta": (("pooler",), 6),
    "electra": ((), 6),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Conversion]]:
    root = tmp_path_factory.mktemp("dense")
    folders = {kind: save(root / kind.replace(" ", "-"), kind.replace(",", "")) for kind in KINDS}
    return {kind: (folder, converted(open_checkpoint(folder), SETTINGS)) for kind, folder in folders.items()}


def encoder_inputs(conversion: Conversion, tokens: int) -> tuple[torch.Tensor, ...]:
    """Two rows; of texts the second has two tokens of padding."""
    config = conversion.config
    generator = torch.Generator().manual_seed(1)
    if config.image is not None:
        return (torch.randn(2, config.image.channels, config.image.height, config.image.width, generator=generator),)
    ids = torch.randint(4, config.vocab_size or 0, (2, tokens), generator=generator)
    mask = (torch.arange(tokens) < torch.tensor([[tokens], [tokens - 2]])).long()
    return (ids, mask, *([ids % 2] if len(config.inputs) == 3 else []))


def dense_states(folder: Path, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The last states of transformers' own encoder, in float64."""
    import transformers

    name = "T5EncoderModel" if "t5" in folder.name else "AutoModel"
    module = getattr(transformers, name).from_pretrained(folder).eval().requires_grad_(False)
    names = ("input_ids", "attention_mask", "token_type_ids") if len(inputs) > 1 else ("pixel_values",)
    with in_float64(module):
        wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
        states: torch.Tensor = module(**dict(zip(names, wide, strict=False))).last_hidden_state
    return states


@pytest.mark.parametrize("kind", KINDS)
def test_at_one_it_is_the_encoder_that_it_was_made_of(kind: str, made: dict[str, tuple[Path, Conversion]]) -> None:
    folder, found = made[kind]
    left_out, tokens = KINDS[kind]
    inputs = encoder_inputs(found, 6)
    model = copy.deepcopy(found.model)
    model.reduction = 1
    with in_float64(model):
        states = model(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs))
        model.reduction = 2
        routed = model(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs))
    expected = dense_states(folder, inputs)
    assert states.shape[1] == tokens
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-10)
    assert float((routed - expected).abs().max()) > 1e-3, "fewer tokens pass at r = 2"
    assert found.left_out == left_out


@pytest.mark.parametrize("kind", ["t5", "bert", "vit"])
def test_every_token_at_a_gate_of_one_is_the_encoder_too(kind: str, made: dict[str, tuple[Path, Conversion]]) -> None:
    """Through the conditional branch itself, which r = 1 passes by: first k of all tokens has gates of 1."""
    folder, _ = made[kind]
    for keys_of in ("selected", "all"):
        settings = ConversionSettings(router="first_k", keys_of=keys_of, reduction=1, reductions=(1,))
        found = converted(open_checkpoint(folder), settings)
        routed = CodaEncoder(replace(found.config, reduction_of_one="routed"))
        routed.load_state_dict(found.model.state_dict())
        inputs, model = encoder_inputs(found, 6), routed
        with in_float64(model):
            states = model(*(t.double() if t.is_floating_point() else t for t in inputs))
        assert set(model.counts(states.shape[1]).values()) == {states.shape[1]}
        valid = inputs[1] > 0 if len(inputs) > 1 else torch.ones(states.shape[:2], dtype=torch.bool)
        torch.testing.assert_close(states[valid], dense_states(folder, inputs)[valid], rtol=0, atol=1e-10)


@pytest.mark.parametrize("adapter", ["sequential", "lora"])
def test_the_other_adapters_add_nothing_at_first_either(adapter: Any, made: dict[str, tuple[Path, Conversion]]) -> None:
    folder, _ = made["bert"]
    found = converted(open_checkpoint(folder), replace(SETTINGS, adapter=adapter))
    assert found.config.adapter == adapter
    inputs, model = encoder_inputs(found, 6), found.model
    model.reduction = 1
    with in_float64(model):
        states = model(*inputs)
    torch.testing.assert_close(states, dense_states(folder, inputs), rtol=0, atol=1e-10)


def test_only_what_is_added_is_drawn(made: dict[str, tuple[Path, Conversion]]) -> None:
    folder, first = made["bert"]
    again = converted(open_checkpoint(folder), SETTINGS)
    other = converted(open_checkpoint(folder), ConversionSettings(adapter_size=4, reduction=2, seed=4))
    for (name, one), same, third in zip(
        first.model.named_parameters(), again.model.parameters(), other.model.parameters(), strict=True
    ):
        assert torch.equal(one, same), name
        drawn = name.endswith(("adapter.down.weight", "router.weight"))
        assert torch.equal(one, third) != drawn, name
        if ".adapter.up." in name:
            assert not one.any()
        if ".router." in name:
            assert 0 < float(one.std()) < 0.1


def test_what_settings_say_is_in_the_configuration(made: dict[str, tuple[Path, Conversion]]) -> None:
    folder, default = made["bert"]
    assert (default.config.offered, default.config.reduction_of_one) == ((8, 5, 3, 2, 1), "dense")
    settings = ConversionSettings(
        router="sigmoid",
        adapter_activation="gelu",
        keys_of="selected",
        reduction=4,
        reductions=(4, 8),
        dense_layers=(0,),
        num_labels=3,
    )
    config = converted(open_checkpoint(folder), settings).config
    assert (config.router, config.soft_top_k, config.adapter_activation) == ("sigmoid", None, "gelu")
    assert (config.keys_of, config.offered, config.conditional, config.num_labels) == ("selected", (8, 4), (1,), 3)
    assert config.reduction_of_one == "routed", "which r = 1 is not offered to need"
    assert made["vit"][1].config.offered == (5, 3, 2, 1), "of five tokens"


def test_a_folder_without_biases_is_written_and_read_again(
    made: dict[str, tuple[Path, Conversion]], tmp_path: Path
) -> None:
    """A file holds no tensor under two names."""
    folder, found = made["vit, no bias, classifier"]
    convert_coda(folder, tmp_path / "out", SETTINGS)
    again = load_model(tmp_path / "out").state_dict()
    assert not again["layers.1.attention.key.bias"].any()
    for name, value in found.model.state_dict().items():
        assert torch.equal(again[name], value), name


def test_of_a_decoder_that_is_dropped_nothing_is_judged(tmp_path: Path) -> None:
    with_head = save_t5(tmp_path / "t5", text=False, **DISTANCES)
    headless = save_t5(tmp_path / "t5-headless", "T5Model", text=False, **DISTANCES)
    no_start = edit_config(with_head, decoder_start_token_id=...)
    (no_start / "generation_config.json").unlink()
    for folder in (no_start, headless):
        found = converted(open_checkpoint(folder), SETTINGS)
        assert found.left_out == ("decoder",)
        inputs, model = encoder_inputs(found, 6), found.model
        model.reduction = 1
        with in_float64(model):
            states = model(*inputs)
        torch.testing.assert_close(states, dense_states(folder, inputs), rtol=0, atol=1e-10)
        with pytest.raises(CheckpointError, match=r"decoder_start_token_id: expected a token|architectures: expected"):
            convert_coda(folder, tmp_path / "out", SETTINGS, with_decoder=True)


def test_modules_of_sentence_transformers_are_left_out(tmp_path: Path) -> None:
    add_pooling(save_tiny_encoder(tmp_path / "m", num_hidden_layers=1))
    found = converted(open_checkpoint(tmp_path / "m"), SETTINGS)
    assert found.left_out == ("pooler", "modules of sentence-transformers")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bert", {"model_type": "convbert"}, "model_type 'convbert' cannot be made conditional; expected one of t5, vit,"),
    ("bert", {"model_type": 3}, "model_type 3 cannot be made conditional"),
    ("bert", {"is_decoder": True}, "is_decoder: a decoder's tokens cannot be routed; expected an encoder"),
    (
        "bert",
        {"hidden_act": "silu"},
        "hidden_act: 'silu' is no activation of conditional layers; expected one of re",
    ),
    (
        "t5",
        {"feed_forward_proj": "silu", "dense_act_fn": ...},
        "feed_forward_proj: 'silu' is no activation of conditional layers",
    ),
    ("t5", {"dense_act_fn": "gelu"}, "dense_act_fn: expected relu, as feed_forward_proj relu says, got 'gelu'"),
    ("t5", {"relative_attention_max_distance": 64}, "relative_attention_num_buckets and relative_attention_max_dist"),
    ("vit", {"layer_norm_eps": "small"}, "config.json: layer_norm_eps: expected a number between 0 and 1, got 'small'"),
    ("bert", {"layer_norm_eps": None}, "config.json: layer_norm_eps: expected a number between 0 and 1, got None"),
    ("t5", {"layer_norm_epsilon": 0}, "config.json: layer_norm_epsilon: expected a number between 0 and 1, got 0"),
]


@pytest.mark.parametrize(("kind", "change", "problem"), REFUSED, ids=[problem[:24] for _, _, problem in REFUSED])
def test_what_does_not_map_is_refused_in_one_line(
    kind: str, change: dict[str, Any], problem: str, made: dict[str, tuple[Path, Conversion]], tmp_path: Path
) -> None:
    folder = made[kind][0]
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    edit_config(tmp_path, **change)
    with pytest.raises((CheckpointError, UnsupportedModelError)) as error:
        converted(open_checkpoint(tmp_path), SETTINGS)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_widths_projections_and_missing_weights_are_refused(tmp_path: Path) -> None:
    cut_ffn(save_tiny_vit(tmp_path / "cut"), [32, 16])
    with pytest.raises(CheckpointError, match="intermediate_size: layers of different widths cannot be made cond"):
        converted(open_checkpoint(tmp_path / "cut"), SETTINGS)
    save_tiny_encoder(tmp_path / "m", "electra", embedding_size=16, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="embedding_size: 16 numbers of a token are projected to 32"):
        converted(open_checkpoint(tmp_path / "m"), SETTINGS)
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file"):
        converted(open_checkpoint(tmp_path / "m", untrained=True), SETTINGS)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"dense_layers": (2,)}, "dense layers: expected numbers from 0 to 1, got 2"),
        ({"dense_layers": (0, 1)}, "dense layers: all 2 are listed; expected at least one conditional layer"),
        ({"reductions": (8, 1)}, r".*, made conditional: reductions: \[8, 1\] lack 3, the reduction of training"),
        ({"seed": 2**32}, "seed: expected a whole number from 0 to 4294967295, got 4294967296"),
        ({"seed": 0.5}, "seed: expected int, got float 0.5"),
        (
            {"adapter": "lora", "adapter_activation": "gelu"},
            "adapter activation: lora has none, got gelu; leave it out",
        ),
        ({"adapter_size": 16_385}, "adapter_size: .*16384"),
        ({"num_labels": 65_537}, "num_labels: .*65536"),
        ({"reduction": 41}, ".*, made conditional: reduction: 41: expected 1 to 40, the tokens of max_position"),
    ],
)
def test_settings_that_make_no_model(
    settings: dict[str, Any], problem: str, made: dict[str, tuple[Path, Conversion]]
) -> None:
    with pytest.raises((PlanError, CheckpointError, InputError), match=f"^{problem}"):
        converted(open_checkpoint(made["bert"][0]), ConversionSettings(**settings))


def test_the_reference_is_the_family_s_own(made: dict[str, tuple[Path, Conversion]]) -> None:
    """A compile of the original is compared with the same answers of transformers."""
    folder, found = made["bert"]
    inputs = encoder_inputs(found, 6)
    module = load_universal(open_source(folder)).module
    torch.testing.assert_close(module(*inputs)[0].double(), dense_states(folder, inputs), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [{}, V1_1, {**V1_1, "feed_forward_proj": "gated-relu", "num_decoder_layers": 2}],
    ids=["first", "v1.1", "gated relu"],
)
def test_at_one_it_is_the_t5_that_it_was_made_of(tmp_path: Path, changes: dict[str, Any]) -> None:
    import transformers

    folder = save_small_t5(tmp_path / "m", **changes)
    report = nestforge.convert_coda(folder, tmp_path / "out", T5_SETTINGS, with_decoder=True)
    assert (report.left_out, report.decoder_layers) == ((), changes.get("num_decoder_layers", 1))
    assert (tmp_path / "out" / "generation_config.json").is_file()
    dense = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval().requires_grad_(False)
    ours = load_pair(tmp_path / "out")
    ours.encoder.reduction = 1
    draw = torch.Generator().manual_seed(0)
    read, written = (torch.randint(3, 40, (2, 9), generator=draw) for _ in range(2))
    mask = (torch.arange(9) < torch.tensor([[9], [6]])).long()
    with in_float64(dense), in_float64(ours):
        expected = dense(input_ids=read, attention_mask=mask, decoder_input_ids=written).logits
        found = ours(read, mask, written)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_sizes_are_those_of_the_folder(tmp_path: Path) -> None:
    report = nestforge.convert_coda(save_small_t5(tmp_path / "m"), tmp_path / "out", T5_SETTINGS, with_decoder=True)
    source = open_source(tmp_path / "out")
    whole = source.spec.universal()
    assert report.parameters == source.parameters(whole)
    assert report.groups["routers"] == 16
    assert source.spec.universal().id == "ffn32-coda.reduction1"


def test_folders_without_a_decoder_are_refused(tmp_path: Path) -> None:
    from support.tiny_models import save_t5

    alone = save_t5(
        tmp_path / "t5",
        "T5EncoderModel",
        text=False,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
    )
    for folder in (alone, save_tiny_encoder(tmp_path / "bert", num_hidden_layers=1)):
        with pytest.raises(CheckpointError, match=r"no decoder to keep; expected a T5ForConditionalGeneration$"):
            nestforge.convert_coda(folder, tmp_path / "out", T5_SETTINGS, with_decoder=True)
    labelled = nestforge.ConversionSettings(adapter_size=4, num_labels=3)
    with pytest.raises(CheckpointError, match="encoder: num_labels: got 3 before a decoder of T5; expected none"):
        nestforge.convert_coda(save_small_t5(tmp_path / "m"), tmp_path / "out", labelled, with_decoder=True)
    assert not (tmp_path / "out").exists()
