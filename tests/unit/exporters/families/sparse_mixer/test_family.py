from pathlib import Path
from typing import Any

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import RoutingEntry
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.errors import CheckpointError, ExportError, PlanError
from nestforge.exporters.architecture import ParameterGroups
from nestforge.exporters.families.sparse_mixer.moe import MoE
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.tiny_mixer import save_tiny_mixer
from support.tiny_models import edit_config

BUCKET = Bucket(2, 16)
TOKENS = ("batch", "sequence")
DENSE: dict[str, Any] = {"moe_layers": (), "num_experts": 0, "expert_intermediate_size": None}


def ids(length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, high, (2, length), generator=generator) for high in (24, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_mixer(tmp_path_factory.mktemp("mixer") / "m")


def test_signature(folder: Path) -> None:
    signature = open_source(folder).signature
    assert signature.inputs == (
        TensorSpec("input_ids", "int64", TOKENS, pad=0, high=24),
        TensorSpec("token_type_ids", "int64", TOKENS, pad=0, high=2),
    )
    assert signature.outputs == (
        TensorSpec("last_hidden_state", "float32", (*TOKENS, 16)),
        TensorSpec("pooler_output", "float32", ("batch", 16)),
    )
    assert (signature.max_sequence, signature.mask, signature.bound) == (16, None, "linear mixing")
    assert (signature.text.ids, signature.text.mask, signature.text.type_ids) == ("input_ids", None, "token_type_ids")


def test_one_type_of_tokens_is_no_input(tmp_path: Path) -> None:
    """Every token is of it."""
    source = open_source(save_tiny_mixer(tmp_path / "m", type_vocab_size=1))
    assert [spec.name for spec in source.signature.inputs] == ["input_ids"]
    assert source.signature.text.type_ids is None
    module, (given, _) = load_universal(source).module.model, ids(16)
    for expected, found in zip(module(given, torch.zeros_like(given)), module(given), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("head", "labels", "outputs"),
    [
        ("masked_lm", None, (TensorSpec("logits", "float32", (*TOKENS, 24), role="tokens"),)),
        ("classifier", 3, (TensorSpec("logits", "float32", ("batch", 3), role="classes"),)),
        (
            "pretraining",
            2,
            (
                TensorSpec("logits", "float32", (*TOKENS, 24), role="tokens"),
                TensorSpec("labels", "float32", ("batch", 2)),
            ),
        ),
    ],
)
def test_a_head_decides_what_comes_out(
    tmp_path: Path, head: str, labels: int | None, outputs: tuple[TensorSpec, ...]
) -> None:
    source = open_source(save_tiny_mixer(tmp_path / "m", head=head, num_labels=labels))
    assert source.signature.outputs == outputs
    found = load_universal(source).module(*ids(16))
    assert [tuple(output.shape) for output in found] == [spec.shape(BUCKET) for spec in outputs]


def test_a_model_that_mixes_takes_one_sequence_and_one_that_attends_any(tmp_path: Path, folder: Path) -> None:
    mixes = open_source(folder).signature
    assert mixes.buckets([BUCKET, Bucket(1, 16)], []) == (BUCKET, Bucket(1, 16))
    with pytest.raises(ExportError, match=r"^bucket b2-s8: linear mixing is bound to 16 tokens; ask for bucket b2-s16"):
        mixes.buckets([BUCKET, Bucket(2, 8)], [])
    attends = open_source(save_tiny_mixer(tmp_path / "m", attention_layers=(0, 1, 2, 3), **DENSE)).signature
    assert mixes.buckets(None, [Bucket(1, 8), Bucket(1, 4), Bucket(2, 8)]) == (Bucket(1, 16), Bucket(2, 16))
    assert attends.buckets([Bucket(2, 8), BUCKET], []) == (Bucket(2, 8), BUCKET)
    for signature in (mixes, attends):
        with pytest.raises(ExportError, match=r"^bucket b1-s32: the model takes at most 16 tokens$"):
            signature.buckets([Bucket(1, 32)], [])


def test_parameters_and_tables(folder: Path) -> None:
    source = open_source(folder)
    tables = (24 + 16 + 2) * 16
    groups = source.parameter_groups(source.spec.universal())
    assert groups.embedding == tables
    expert = 2 * 16 * 24 + 24 + 16
    two = source.spec.submodel({"moe.experts": 2})
    assert source.parameter_groups(two) == ParameterGroups(groups.total - 2 * 2 * expert, tables, 0)


def test_metadata_and_routes_of_an_engine(folder: Path, tmp_path: Path) -> None:
    source = open_source(folder)
    spec = source.spec
    assert source.metadata(spec.universal(), BUCKET) == {
        "router": "experts_choose",
        "groups": 1,
        "tokens per group": 32,
        "experts": 4,
        "experts scored": 4,
        "capacity factor": "100 %",
        "capacity": 8,
        "capacity rounding": "half_even",
        "min capacity": 1,
        "rows share slots": "yes",
    }
    smaller = spec.submodel({"moe.capacity_factor": 25, "moe.group_size": 16, "moe.experts": 3})
    metadata = source.metadata(smaller, BUCKET)
    assert [metadata[key] for key in ("groups", "tokens per group", "capacity", "experts")] == [2, 16, 1, 3]
    assert metadata["rows share slots"] == "no"
    assert source.routes(smaller, BUCKET) == tuple(RoutingEntry(f"routes.{n}", (2, 3, 1)) for n in (1, 2))
    tokens_choose = open_source(save_tiny_mixer(tmp_path / "m", router="tokens_choose", group_size=16))
    found = tokens_choose.routes(tokens_choose.spec.universal(), BUCKET)
    assert found == tuple(RoutingEntry(f"routes.{n}", (2, 16)) for n in (1, 2))


def test_a_model_without_experts_has_neither_metadata_nor_routes(tmp_path: Path) -> None:
    source = open_source(save_tiny_mixer(tmp_path / "m", **DENSE))
    universal = source.spec.universal()
    assert universal.id == "universal"
    assert source.spec.parse("universal") == universal
    assert source.metadata(universal, BUCKET) == {}
    assert source.routes(universal, BUCKET) == ()


def test_narrowing_sets_the_budget_and_leaves_the_model_as_it_was(folder: Path) -> None:
    universal = load_universal(open_source(folder))
    narrowed = universal.narrow(
        universal.spec.submodel({"moe.capacity_factor": 50, "moe.group_size": 16, "moe.experts": 2})
    )
    for module, expected in ((narrowed, (50, 16, 2)), (universal.module, (100, 4096, 4))):
        found = [(part.percent, part.group_size, part.kept) for part in module.modules() if isinstance(part, MoE)]
        assert found == [expected] * 2
    assert tuple(narrowed.model.layers[1].moe.experts.up_weight.shape) == (2, 16, 24)
    assert tuple(narrowed.model.layers[1].moe.router.weight.shape) == (4, 16), "all experts are scored"


def test_narrowing_to_a_shorter_sequence(tmp_path: Path) -> None:
    universal = load_universal(open_source(save_tiny_mixer(tmp_path / "m", mixing="hartley", **DENSE)))
    assert universal.spec.submodel({"sequence": 8}).at(BUCKET) == Bucket(2, 8)
    narrowed = universal.narrow(universal.spec.submodel({"sequence": 8}))
    assert tuple(narrowed(*ids(8))[0].shape) == (2, 8, 16)
    assert tuple(universal.module(*ids(16))[0].shape) == (2, 16, 16)


def test_the_cost_of_a_shorter_sequence_is_counted_at_its_own_bucket(tmp_path: Path) -> None:
    source = open_source(save_tiny_mixer(tmp_path / "m", mixing="toeplitz"))
    short = source.spec.submodel({"sequence": 8})
    assert source.architecture.workload(short, BUCKET) == source.architecture.workload(short, Bucket(2, 8))
    assert source.variants(short, BUCKET) == source.variants(short, Bucket(2, 8))
    assert source.metadata(short, BUCKET)["tokens per group"] == 16


def test_a_capacity_without_slots_is_refused_before_anything_runs(tmp_path: Path) -> None:
    source = open_source(save_tiny_mixer(tmp_path / "m", min_capacity=0, capacities=(1, 100)))
    with pytest.raises(PlanError, match=r"^bucket b2-s16: 1 % of 32 tokens over 4 experts rounds to 0 slots"):
        source.workload(source.spec.submodel({"moe.capacity_factor": 1}), BUCKET)


@pytest.mark.parametrize(
    ("mixing", "changes", "message"),
    [
        ("linear", {"num_experts": 8}, r"config.json: num_experts: 8, but the weights of layer 1 hold 4$"),
        *(
            (
                mixing,
                {"max_position_embeddings": 32},
                rf"config.json: max_position_embeddings: 32, but the {mixing} mixing of layer 0 is bound to the 16 "
                r"tokens that it was trained for$",
            )
            for mixing in ("linear", "toeplitz", "circulant")
        ),
        ("linear", {"moe_layers": [1]}, r": tensor layers.2.ffn.up.weight is missing from the weights$"),
    ],
)
def test_weights_that_do_not_fit_the_configuration(
    tmp_path: Path, mixing: str, changes: dict[str, Any], message: str
) -> None:
    folder = save_tiny_mixer(tmp_path / "m", mixing=mixing)
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_source(folder)
