"""MatLM as a family, and with elastic heads, whose KV-cache engines have as many heads as each submodel."""

import math
import re
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import onnx
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.verify import verify_bundle
from nestforge.errors import CheckpointError
from nestforge.exporters.family import load_model
from nestforge.exporters.source import ModelSource, open_source
from nestforge.exporters.universal import load_universal
from nestforge.workload import macs
from support.tiny_compile import assert_tensorrt_takes, board
from support.tiny_matlm import save_tiny_matlm
from support.tiny_models import edit_config

AS_COUNTED: dict[str, Any] = {"position": "relative_bias", "bias": True, "norm_weights": True}
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_matlm(tmp_path / "m", intermediate_size=(16, 64, 32), nested_heads=True)


@pytest.fixture
def source(folder: Path) -> ModelSource:
    return open_source(folder)


def test_axes_levels_and_signature(source: ModelSource) -> None:
    assert source.spec.universal().id == "ffn16x1_64x1_32x1-heads4"
    assert (source.spec.trained_nested, source.spec.depth) == (True, 3)
    assert source.spec.granularities == {"ffn": (0.125, 0.25, 0.5, 1.0), "heads": (0.25, 0.5, 0.75, 1.0)}
    (ids,), (logits,) = source.signature.inputs, source.signature.outputs
    assert (ids.name, ids.dtype, ids.dims, ids.pad, ids.high) == ("input_ids", "int64", ("batch", "sequence"), 0, 64)
    assert (logits.name, logits.dims, logits.role) == ("logits", ("batch", "sequence", 64), "next_tokens")
    assert (source.signature.max_sequence, source.signature.mask, source.signature.text) == (48, None, None)


def test_heads_are_no_axis_unless_they_are_nested(tmp_path: Path) -> None:
    source = open_source(save_tiny_matlm(tmp_path / "m", granularities={"ffn": (0.5, 1.0)}))
    assert source.spec.universal().id == "ffn64"
    assert source.spec.granularities == {"ffn": (0.5, 1.0)}


def test_a_tokenizer_in_the_folder_feeds_the_ids_alone(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    text = open_source(folder).signature.text
    assert (text.ids, text.mask, text.type_ids, text.embedding) == ("input_ids", None, None, None)


def test_counts_and_costs(source: ModelSource) -> None:
    sub = source.spec.parse("ffn8x1_16x2-heads3")
    assert source.parameters(sub) == 64 * 32 + 3 * 4 * 32 * 24 + 2 * 32 * (8 + 16 + 16)
    read = sum(op.weight_bytes for op in source.workload(sub, Bucket(1, 12)) if op.kind == "gemm")
    assert read == 4 * source.parameters(sub), "no biases, and the embedding once more as the head"
    per_layer = 12 * 4 * 32 * 24 + 2 * 12 * 12 * 24
    assert macs(source.workload(sub, Bucket(1, 12))) == 3 * per_layer + 12 * 2 * 32 * 40 + 12 * 32 * 64


def test_counts_and_costs_of_biases_norms_and_relative_positions(tmp_path: Path) -> None:
    source = open_source(save_tiny_matlm(tmp_path / "m", nested_heads=True, **AS_COUNTED))
    sub = source.spec.parse("ffn16-heads3")
    layer = 4 * 32 * 24 + 3 * 24 + 32 + 2 * 32 * 16 + 16 + 32 + 4 * 32 + 3 * 32  # the last: 3 heads of 32 buckets
    assert source.parameters(sub) == 64 * 33 + 3 * layer + 2 * 32
    groups = source.parameter_groups(sub)
    assert (groups.embedding, groups.ffn) == (64 * 33, 3 * (2 * 32 * 16 + 16)), "a bias per token is the table's"
    ops = source.workload(sub, Bucket(2, 12))
    read = sum(op.weight_bytes for op in ops if op.kind == "gemm")
    assert read == 4 * (64 * 33 + 3 * (layer - 4 * 32 - 3 * 32)), "every linear layer with its bias"
    (lookup,) = (op for op in ops if op.name == "layers.2.relative_bias")
    assert (lookup.kind, lookup.activation_bytes) == ("gather", 4 * 3 * 12 * 12), "once for all rows"
    assert not any("rotary" in op.name for op in ops)


def test_narrowing_equals_masking_what_was_cut(source: ModelSource) -> None:
    universal = load_universal(source)
    sub = source.spec.parse("ffn8x1_16x2-heads1x1_3x2")
    (found,) = universal.narrow(sub)(IDS)
    masked = load_model(source.checkpoint.folder)
    for layer, (width, heads) in enumerate([(8, 1), (16, 3), (16, 3)]):
        masked.get_parameter(f"layers.{layer}.ffn.down.weight").data[:, width:] = 0
        masked.get_parameter(f"layers.{layer}.attention.output.weight").data[:, 8 * heads :] = 0
    torch.testing.assert_close(found, masked(IDS), atol=1e-5, rtol=1e-5)
    assert math.isfinite(found.abs().max())


def test_weights_that_do_not_fit_are_named(folder: Path) -> None:
    edit_config(folder, intermediate_size=[16, 48, 32])
    problem = f"{folder}: tensor layers.1.ffn.up.weight has shape [64, 32]; expected [48, 32] as config.json says"
    with pytest.raises(CheckpointError, match=f"^{re.escape(problem)}$"):
        open_source(folder)


def test_a_folder_without_weights_can_be_described_and_not_loaded(folder: Path) -> None:
    whole = open_source(folder)
    (folder / "model.safetensors").unlink()
    source = open_source(folder)
    assert source.shapes == whole.shapes
    assert source.spec == whole.spec
    missing = f"{folder}/model.safetensors: no such file; expected it or model.safetensors.index.json with its shards"
    for use in (load_universal, lambda source: source.checkpoint.source_files()):
        with pytest.raises(CheckpointError, match=f"^{re.escape(missing)}$"):
            use(source)
    edit_config(folder, model_type="bert")
    with pytest.raises(CheckpointError, match=f"^{re.escape(missing)}$"):
        open_source(folder)  # this family reads its widths off the weights


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_matlm(
        tmp_path_factory.mktemp("matlm") / "m",
        activation="squared_relu",
        tie_word_embeddings=False,
        nested_heads=True,
        num_hidden_layers=2,
    )
    return compile_bundle(folder, board(budgets={"full": {}}), folder.with_suffix(".bundle"), buckets=[Bucket(2, 12)])


def test_every_engine_is_a_slice(bundle: Path) -> None:
    engines = nestforge.open_bundle(bundle).manifest.engines
    assert [engine.submodel for engine in engines] == ["ffn8-heads1", "ffn16-heads2", "ffn32-heads3", "ffn64-heads4"]
    assert {(engine.emitted, engine.slice_problem) for engine in engines} == {("sliced", None)}
    assert_tensorrt_takes(bundle)


@pytest.mark.parametrize(
    "kind",
    [
        AS_COUNTED,
        {**AS_COUNTED, "bias": False},
        {**AS_COUNTED, "norm_weights": False, "tie_word_embeddings": False},
        {**AS_COUNTED, "position": "rotary"},
    ],
    ids=["as-counted", "no-bias", "no-norm-weights-untied", "rotary"],
)
def test_every_kind_is_sliced_and_proven(tmp_path: Path, kind: dict[str, Any]) -> None:
    """Over 40 tokens, so that distances share buckets; answers of the runtime are those of the narrowed module."""
    folder = save_tiny_matlm(tmp_path / "m", nested_heads=True, num_hidden_layers=2, **kind)
    made = compile_bundle(folder, board(budgets={"full": {}}), tmp_path / "b", buckets=[Bucket(1, 40)])
    engines = nestforge.open_bundle(made).manifest.engines
    assert [engine.submodel for engine in engines] == ["ffn8-heads1", "ffn16-heads2", "ffn32-heads3", "ffn64-heads4"]
    assert {(engine.emitted, engine.slice_problem) for engine in engines} == {("sliced", None)}
    assert max(engine.private_bytes for engine in engines) < 1500
    if "rotary" not in kind.values():
        graph = onnx.load(made / engines[0].file, load_external_data=False).graph
        looked_up = [node.input[0] for node in graph.node if node.op_type.startswith("Gather")]
        assert looked_up == ["embed_tokens.weight", "layers.0.relative_bias.weight", "layers.1.relative_bias.weight"]
        assert not any(node.op_type == "Clip" for node in graph.node), "buckets of distances are a table"
    assert verify_bundle(made, against=folder)
    universal = load_universal(open_source(folder))
    ids = torch.randint(0, 64, (1, 37), generator=torch.Generator().manual_seed(1))
    with nestforge.load(made) as model:
        answer = model({"input_ids": ids.numpy()}, submodel="ffn16-heads2")
    with torch.no_grad():
        (expected,) = universal.narrow(universal.spec.parse("ffn16-heads2"))(ids)
    np.testing.assert_allclose(answer.outputs["logits"], expected.numpy(), atol=1e-4, rtol=1e-4)


def test_a_short_row_answers_as_if_it_were_alone(bundle: Path) -> None:
    """Padding stands on the right, where a causal model does not look."""
    universal = load_universal(open_source(bundle.with_suffix("")))
    with nestforge.load(bundle) as model:
        answer = model({"input_ids": IDS[:1, :5].numpy()}, submodel="ffn16-heads2")
    with torch.no_grad():
        (expected,) = universal.narrow(universal.spec.parse("ffn16-heads2"))(IDS[:1, :5])
    assert answer.outputs["logits"].shape == (1, 5, 64)
    np.testing.assert_allclose(answer.outputs["logits"], expected.numpy(), atol=1e-4, rtol=1e-4)


WHOLE, NARROW = "ffn32-heads4", "ffn16-heads3"


@pytest.fixture(scope="module")
def generating(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """With a relative bias, which has a row for each head; rotary positions are those of the golden generating."""
    folder = tmp_path_factory.mktemp("matlm")
    options = {"position": "relative_bias", "num_hidden_layers": 1, "intermediate_size": 32}
    model = save_tiny_matlm(folder / "m", nested_heads=True, **options)
    profile = board(budgets={"full": {}}, buckets=["1x8"])
    submodels, levels = [NARROW], {"ffn": (1.0,), "heads": (1.0,)}
    path = nestforge.compile(
        model, profile, folder / "b", generate=True, measure=False, submodels=submodels, levels=levels
    )
    return open_bundle(path)


def test_one_trace_gives_the_engines_of_all_numbers_of_heads(generating: Bundle) -> None:
    entry = generating.manifest.generation
    found = {engine.submodel: (engine.emitted, engine.kind.cache_heads) for engine in entry.engines}
    assert found == {WHOLE: ("sliced", None), NARROW: ("sliced", (3,))}
    for engine in entry.engines:
        heads = 4 if engine.submodel == WHOLE else 3
        graph = onnx.load(generating.file(engine.file), load_external_data=False).graph
        (node,) = (node for node in graph.node if node.op_type == "GroupQueryAttention")
        numbers = {attribute.name: attribute.i for attribute in node.attribute}
        assert (numbers["num_heads"], numbers["kv_num_heads"]) == (heads, heads)
        caches = [tensor for tensor in (*graph.input, *graph.output) if tensor.name.startswith(("past", "present"))]
        assert [tensor.type.tensor_type.shape.dim[1].dim_value for tensor in caches] == [heads] * 4


@pytest.mark.parametrize(("submodel", "ffn", "heads"), [(WHOLE, 32, 4), (NARROW, 16, 3)])
def test_text_is_what_the_module_writes(generating: Bundle, submodel: str, ffn: int, heads: int) -> None:
    """Greedily, against passes of the module, with the rest at zero, over everything so far; several rows as one."""
    model, prompts = load_model(generating.path.with_name("m")), [[3, 1, 4, 1, 5], [7, 8]]
    model.get_parameter("layers.0.ffn.down.weight").data[:, ffn:] = 0
    model.get_parameter("layers.0.attention.output.weight").data[:, 8 * heads :] = 0
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(16):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    with nestforge.load(generating.path) as served:
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert list(served.generate(prompt, max_tokens=16, submodel=submodel).rows[0].tokens) == tokens
        rows = served.generate(prompts, max_tokens=16, submodel=submodel).rows
        assert [list(row.tokens) for row in rows] == expected


def test_verify_runs_every_number_of_heads_again(generating: Bundle) -> None:
    report = nestforge.verify(generating.path, generating.path.with_name("m"))
    assert report
    assert {verdict.engine for verdict in report.engines} >= {f"{one}.cached@b1_64-s1_48" for one in (WHOLE, NARROW)}
