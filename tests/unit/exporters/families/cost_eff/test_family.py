"""The family: axes, costs, and that what it cuts equals what PyTorch computes without it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from nestforge.bucket import Bucket
from nestforge.bundle.manifest import Proof
from nestforge.compiler.model_view import view_model
from nestforge.elastic import PrefixSlice
from nestforge.errors import PlanError
from nestforge.exporters.families.cost_eff import loading
from nestforge.exporters.source import ModelSource, open_source
from nestforge.exporters.universal import UniversalModel, load_universal, magnitude_scores, rank, taylor_scores
from nestforge.profiles.compile_request import CompileRequest
from support.cost_eff_models import (
    CONFIG,
    SIDECAR,
    changed,
    random_weights,
    save_folder,
    save_headers,
    save_published,
    save_tiny,
    shapes_of,
)

IDS = torch.randint(4, 60, (3, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 12, [1] * 7 + [0] * 5, [1] + [0] * 11])
TYPES = torch.tensor([[0] * 6 + [1] * 6] * 3)
FEEDS = {"input_ids": IDS.numpy(), "attention_mask": MASK.numpy(), "token_type_ids": TYPES.numpy()}


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    return open_source(save_tiny(tmp_path / "m"))


@pytest.fixture
def universal(source: ModelSource) -> UniversalModel:
    return load_universal(source)


def _outputs(model: UniversalModel) -> dict[str, torch.Tensor]:
    names = [spec.name for spec in model.source.signature.outputs]
    return dict(zip(names, model.module(IDS, MASK, TYPES), strict=True))


def test_axes_have_each_layers_own_width_and_leave_out_what_is_gone(source) -> None:
    sizes = {axis.name: axis.size for axis in source.spec.axes}
    assert sizes == {
        "depth": 4,
        "layers.0.ffn": 48,
        "layers.0.heads": 3,
        "layers.1.ffn": 64,
        "layers.1.heads": 4,
        "layers.2.ffn": 40,
        "layers.3.heads": 2,
    }
    assert source.spec.axes[0].choices == (1, 3, 4)
    assert source.spec.universal().id == "depth4-ffn48x1_64x1_40x1-heads3x1_4x1_2x1"
    assert source.spec.parse(source.spec.universal().id) == source.spec.universal()
    assert not source.spec.trained_nested


def test_the_last_exit_answers(source, universal) -> None:
    assert [spec.name for spec in source.signature.outputs] == ["logits", "entropy"]
    outputs = _outputs(universal)
    for spec in source.signature.outputs:
        assert tuple(outputs[spec.name].shape) == spec.shape(Bucket(3, 12))
        assert outputs[spec.name].dtype == torch.float32
    states = universal.module.model.hidden_states(IDS, MASK, TYPES)
    torch.testing.assert_close(outputs["logits"], universal.module.model.exit_logits(4, states[4], MASK))


@pytest.mark.parametrize(("depth", "layers"), [(1, (1,)), (3, (1, 3))])
def test_a_shorter_submodel_answers_at_its_own_last_exit_and_holds_no_more(universal, depth, layers) -> None:
    submodel = universal.spec.parse(f"depth{depth}")
    narrowed = universal.narrow(submodel)
    states = universal.module.model.hidden_states(IDS, MASK, TYPES)
    expected = universal.module.model.answer(depth, states[depth], MASK)
    torch.testing.assert_close(narrowed(IDS, MASK, TYPES), expected)
    held = {name.removeprefix("model."): p.numel() for name, p in narrowed.named_parameters()}
    assert sum(held.values()) == universal.source.parameters(submodel)
    assert {name.split(".")[1] for name in held if name.startswith("exits")} == {str(layer) for layer in layers}
    assert len(universal.module.model.encoder.layer) == 4, "the universal model is as it was"


def test_segments_in_a_row_equal_one_uncut_pass(universal) -> None:
    exits = universal.source.exits
    uncut = list(exits.every_exit(universal.module)(IDS, MASK, TYPES))
    state, found = None, []
    for index, segment in enumerate(exits.entry.segments):
        module = exits.segment(universal.module, index)
        outputs = module(IDS, MASK, TYPES) if state is None else module(state, MASK)
        assert [tuple(o.shape) for o in outputs] == [spec.shape(Bucket(3, 12)) for spec in segment.outputs]
        state, found = outputs[0], [*found, *outputs]
    assert [segment.layer for segment in exits.entry.segments] == [1, 3, 4]
    for expected, output in zip(uncut, found, strict=True):
        assert torch.equal(output, expected)


def test_segments_cost_together_what_the_model_costs(source) -> None:
    universal, bucket = source.spec.universal(), Bucket(2, 10)
    parts = [op for index in range(3) for op in source.exits.workload(universal, bucket, index)]
    assert sorted(parts, key=repr) == sorted(source.workload(universal, bucket), key=repr)


def test_a_segment_is_charged_for_its_own_exit_alone(tmp_path: Path) -> None:
    source = open_source(save_tiny(tmp_path / "m"), exits=[3])
    ops = source.exits.workload(source.spec.universal(), Bucket(2, 10), 0)
    assert {op.name for op in ops if op.name.startswith("exits")} == {
        f"exits.3.{part}" for part in ("pool", "classifier", "entropy")
    }


def test_exits_are_cut_where_it_is_asked(tmp_path: Path) -> None:
    source = open_source(save_tiny(tmp_path / "m"), exits=[1])
    assert [segment.layer for segment in source.exits.entry.segments] == [1, 4], "the last always answers"
    assert source.spec.axes[0].choices == (1, 4)
    assert source.exits.entry.gate.thresholds == (0.4,)
    assert open_source(tmp_path / "m", exits=[4]).exits is None, "one exit makes no chain"
    with pytest.raises(PlanError, match="no exit after layer 2; it has 1, 3, 4"):
        open_source(tmp_path / "m", exits=[2]).spec  # noqa: B018


def test_a_regression_has_no_entropy(tmp_path: Path) -> None:
    source = open_source(save_tiny(tmp_path / "m", sidecar={"exits.classes": 1, "gate": None}))
    assert [spec.name for spec in source.signature.outputs] == ["logits"]
    assert source.exits is None
    assert len(_outputs(load_universal(source))) == 1


def test_one_token_type_is_no_input(tmp_path: Path) -> None:
    source = open_source(save_tiny(tmp_path / "m", {"type_vocab_size": 1}))
    assert [spec.name for spec in source.signature.inputs] == ["input_ids", "attention_mask"]
    model = load_universal(source)
    with_types = model.module.model(IDS, MASK, TYPES * 0)
    torch.testing.assert_close(model.module(IDS, MASK), with_types)


def test_narrowing_equals_masking_what_was_cut(universal) -> None:
    """Independent of any slicing code: zero the down columns of cut channels and the output columns of cut heads."""
    submodel = universal.spec.parse("ffn48_16_8-heads1_4_1")
    narrowed = universal.narrow(submodel)(IDS, MASK, TYPES)
    layers = universal.module.model.encoder.layer
    for index, (width, heads) in enumerate([(48, 1), (16, 4), (8, 0), (0, 1)]):
        if width:
            layers[index].output.dense.weight.data[:, width:] = 0
        if heads:
            layers[index].attention.output.dense.weight.data[:, 8 * heads :] = 0
    for expected, found in zip(_outputs(universal).values(), narrowed, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_keeping_equals_masking_what_is_dropped(tmp_path: Path) -> None:
    """Full-size weights: a model with kept maps equals the whole model with everything else zeroed."""
    config = changed(CONFIG, {"num_attention_heads": 4, "intermediate_size": 64})
    heads = {"0": [1, 3], "1": [], "2": [0, 1, 2, 3], "3": [2]}
    ffn = {"0": list(range(0, 64, 3)), "1": list(range(64)), "2": [], "3": [5, 63]}
    weights = random_weights(shapes_of(config, SIDECAR))
    kept = changed(SIDECAR, {"kept_heads": heads, "kept_ffn": ffn})
    sliced = load_universal(open_source(save_folder(tmp_path / "sliced", config, kept, weights)))
    assert sliced.spec.universal().id == "depth4-ffn22x1_64x1_2x1-heads2x1_4x1_1x1"
    whole = load_universal(open_source(save_folder(tmp_path / "whole", config, SIDECAR, weights)))
    for index, layer in enumerate(whole.module.model.encoder.layer):
        dropped = sorted(set(range(64)) - set(ffn[str(index)]))
        layer.output.dense.weight.data[:, dropped] = 0
        for head in set(range(4)) - set(heads[str(index)]):
            layer.attention.output.dense.weight.data[:, 8 * head : 8 * head + 8] = 0
    expected = _outputs(whole)
    for name, found in _outputs(sliced).items():
        torch.testing.assert_close(found, expected[name], atol=1e-5, rtol=1e-5)
    proofs = {p.subject: p for p in _load_proofs(sliced.source)}
    assert set(proofs) == {"kept heads and channels", "factorised embedding"}
    assert all(0 <= proof.worst <= proof.limit for proof in proofs.values())


def test_a_wrongly_kept_head_fails_the_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = changed(CONFIG, {"num_attention_heads": 4, "intermediate_size": 64})
    every = {str(layer): list(range(64)) for layer in range(4)}
    kept = changed(SIDECAR, {"kept_heads": {str(layer): [1, 3] for layer in range(4)}, "kept_ffn": every})
    source = open_source(save_folder(tmp_path / "m", config, kept, random_weights(shapes_of(config, SIDECAR))))
    permuted = loading.permuted_steps

    def wrongly(data: torch.Tensor, cut: PrefixSlice, places: torch.Tensor) -> torch.Tensor:
        return permuted(data, cut, (places - 1) % (data.shape[cut.dim] // cut.unit))

    monkeypatch.setattr(loading, "permuted_steps", wrongly)
    worst, limit = next((p.worst, p.limit) for p in _load_proofs(source))
    assert worst > limit


def test_factors_that_the_loader_rounds_fail_the_proof(source, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = loading.stored_tensor
    monkeypatch.setattr(loading, "stored_tensor", lambda *names: stored(*names).half().float())
    ((worst, limit),) = [(p.worst, p.limit) for p in _load_proofs(source)]
    assert worst > limit


def test_tensors_without_elements_may_be_stored_or_left_out(tmp_path: Path) -> None:
    weights = random_weights(shapes_of(CONFIG, SIDECAR))
    for part in ("query", "key", "value"):
        weights[f"encoder.layer.2.attention.self.{part}.weight"] = torch.zeros(0, 32)
        weights[f"encoder.layer.2.attention.self.{part}.bias"] = torch.zeros(0)
    stored = open_source(save_folder(tmp_path / "stored", CONFIG, SIDECAR, weights))
    absent = open_source(save_tiny(tmp_path / "absent"))
    assert dict(stored.shapes) == dict(absent.shapes)
    for found, expected in zip(
        _outputs(load_universal(stored)).values(), _outputs(load_universal(absent)).values(), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("scores", [magnitude_scores, lambda model: taylor_scores(model, [(IDS, MASK, TYPES)])])
def test_ranking_leaves_the_function_and_the_files_unchanged(universal, scores) -> None:
    before, weights = _outputs(universal), universal.source.checkpoint.folder / "model.safetensors"
    stored = weights.read_bytes()
    order = universal.module.model.encoder.layer[1].intermediate.dense.bias.clone()
    rank(universal, scores(universal), "taylor")
    assert not torch.equal(order, universal.module.model.encoder.layer[1].intermediate.dense.bias)
    assert weights.read_bytes() == stored
    for name, found in _outputs(universal).items():
        torch.testing.assert_close(found, before[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_at_full_width_it_is_berts_encoder(tmp_path: Path, activation: str) -> None:
    """The weights of a transformers model, pooler and all, plus exits: equal hidden states after every layer."""
    changes = {"num_attention_heads": 4, "intermediate_size": 64, "hidden_act": activation}
    config = changed(CONFIG, changes)
    sidecar = changed(SIDECAR, {"embedding": {"mode": "dense"}})
    torch.manual_seed(0)
    bert_config = transformers.BertConfig(**{**config, "initializer_range": 0.3})
    bert = transformers.BertModel(bert_config).eval()
    heads = {
        name: data for name, data in random_weights(shapes_of(config, sidecar)).items() if name.startswith("exits")
    }
    folder = save_folder(tmp_path / "m", config, sidecar, {**bert.state_dict(), **heads})
    model = load_universal(open_source(folder)).module.model
    with torch.no_grad():
        expected = bert(IDS, MASK, TYPES, output_hidden_states=True).hidden_states
    found = model.hidden_states(IDS, MASK, TYPES)
    assert len(found) == len(expected) == 5
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("heads", "ffn", "rank_", "parameters", "macs", "shown"),
    [(2, 256, 128, 13_920_024, 1_270_892_544, "13.92 1.27"), (6, 1536, 384, 54_984_984, 5_624_580_096, "54.98 5.62")],
)
def test_published_settings(tmp_path: Path, heads, ffn, rank_, parameters, macs, shown) -> None:
    source = open_source(save_published(tmp_path / "m", heads, ffn, rank_))
    universal = source.spec.universal()
    assert universal.id == f"depth12-ffn{ffn}-heads{heads}"
    assert source.parameters(universal) == parameters
    assert _macs(source) == macs
    assert f"{parameters / 1e6:.2f} {macs / 1e9:.2f}" == shown
    levels = view_model(CompileRequest(tmp_path / "m", "raspberry-pi-5", buckets=[Bucket(1, 128)])).levels
    assert [level.label for level in levels] == [f"depth{layer}" for layer in range(1, 13)]
    assert (levels[-1].parameters, levels[-1].macs) == (parameters, {"b1-s128": macs})


def test_sizes_and_costs_are_known_without_torch(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["torch"] = None
from nestforge.bucket import Bucket
from nestforge.exporters.source import open_source
source = open_source(sys.argv[1])
universal = source.spec.universal()
print(source.parameters(universal), len(source.workload(universal, Bucket(1, 128))), len(source.signature.outputs))
"""
    command = [sys.executable, "-c", program, str(save_published(tmp_path / "m", 2, 256, 128))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "13920024 195 2\n"


def test_bert_base_beside_them(tmp_path: Path) -> None:
    config = {"architectures": ["BertForSequenceClassification"], "num_labels": 2}
    with torch.device("meta"):
        bert = transformers.BertForSequenceClassification(transformers.BertConfig(**config))
    shapes = {name: tuple(parameter.shape) for name, parameter in bert.named_parameters()}
    full = json.loads(bert.config.to_json_string(use_diff=False))
    source = open_source(save_headers(tmp_path / "m", {**full, **config}, shapes))
    assert f"{source.parameters(source.spec.universal()) / 1e6:.1f}" == "109.5"
    assert f"{_macs(source) / 1e9:.2f}" == "11.17"


def test_multiply_adds_of_unequal_layers_by_hand(source) -> None:
    s, h, layers = 10, 32, [(3, 48), (4, 64), (0, 40), (2, 0)]
    per_row = sum(4 * s * h * 8 * heads + 2 * s * s * 8 * heads + 2 * s * h * ffn for heads, ffn in layers)
    per_row += s * 16 * h + 3 * h * 3
    assert _macs(source, Bucket(1, s)) == per_row
    assert _macs(source, Bucket(4, s)) == 4 * per_row


def test_weight_bytes_of_the_operations_are_those_of_the_parameters(source) -> None:
    """All parameters but the tables, LayerNorms and the biases of sub-layers that are gone are read by some product."""
    products = [op for op in source.workload(source.spec.universal(), Bucket(1, 8)) if op.kind == "gemm"]
    read = {
        name: shape
        for name, shape in source.shapes.items()
        if "LayerNorm" not in name and ("embeddings." not in name or "projection" in name)
    }
    del read["encoder.layer.2.attention.output.dense.bias"], read["encoder.layer.3.output.dense.bias"]
    assert sum(op.weight_bytes for op in products) == 4 * sum(torch.Size(shape).numel() for shape in read.values())


def _macs(source: ModelSource, bucket: Bucket = Bucket(1, 128)) -> int:
    ops = source.workload(source.spec.universal(), bucket)
    return sum(op.flops for op in ops if op.kind in {"gemm", "batched_gemm"}) // 2


def _load_proofs(source: ModelSource) -> Iterator[Proof]:
    return source.architecture.prove_load(FEEDS)
