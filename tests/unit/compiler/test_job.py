"""What a job settles before it runs: options, whether it can, and what its manifest says of model and tools."""

import contextlib
import json
import subprocess
import sys
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import nestforge
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.manifest import JobOptions
from nestforge.compiler.job import plan, resolve
from nestforge.compiler.model_view import view_model
from nestforge.compiler.provenance import source_entries, tool_versions
from nestforge.errors import NestforgeError, PlanError
from nestforge.exporters.source import open_source
from nestforge.profiles.budget import BudgetSpec
from nestforge.profiles.compile_request import CompileRequest
from nestforge.profiles.precision import run_by
from nestforge.profiles.probe_host import host_profile
from nestforge.runtime.summary import CacheSize
from nestforge.workload import macs
from support.cost_eff_models import save_tiny
from support.gated_decoders import save_decoder
from support.tiny_coda import save_tiny_pair
from support.tiny_compile import board
from support.tiny_models import edit_config, save_gpt2, save_t5

# A kind that levels leave out.
HEADS = tuple(f"layers.{layer}.heads" for layer in range(3))


def test_what_is_left_out_is_the_profiles(tiny_folder: Path) -> None:
    device = board(levels={"ffn": [0.5, 1.0]}, promotion_order="decreasing")
    job = resolve(CompileRequest(tiny_folder, device))
    assert job.profile == device
    assert [level.submodel["layers.0.ffn"] for level in job.levels] == [32, 64]
    assert job.submodels == ()
    assert job.options == JobOptions(whole_along=HEADS)


def test_what_is_asked_for_replaces_the_profiles(tiny_folder: Path) -> None:
    job = resolve(
        CompileRequest(
            tiny_folder,
            board(variants={"moe.combine": "sum"}),
            text="examples.txt",
            levels={"ffn": (0.5, 1)},
            promotion_order="up-down",
            budgets={"small": BudgetSpec(parameters="90 %")},
            submodels=["ffn16-heads4"],
            buckets=[Bucket(1, 8)],
            variants={"other": "one_hot"},
            precisions=["fp32", "int8-dynamic"],
            include="budgets",
        )
    )
    device = job.profile
    assert (device.promotion_order, device.budgets) == ("up-down", {"small": BudgetSpec(parameters="90 %")})
    assert device.buckets == (Bucket(1, 8),)
    assert device.precisions == job.source.precisions == ("fp32", "int8-dynamic")
    assert (device.levels, device.variants) == ({"ffn": (0.5, 1)}, {"moe.combine": "sum", "other": "one_hot"})
    (asked,) = job.submodels
    assert asked["layers.0.ffn"] == 16
    assert job.options == JobOptions("budgets", (asked.id,), text=True, whole_along=HEADS)


def test_axes_that_no_submodel_shrinks_are_whole(tiny_folder: Path) -> None:
    def whole(**options: Any) -> set[str]:
        source = resolve(CompileRequest(tiny_folder, board(), **options)).source
        assert {cut.axis for cut in source.spec.slices}.isdisjoint(source.whole_along)
        return {axis.rpartition(".")[2] for axis in source.whole_along}

    assert whole() == set()
    assert whole(levels={"ffn": [0.5, 1]}) == {"heads"}, "a kind left out keeps its full size"
    assert whole(levels={"ffn": [1]}) == {"ffn", "heads"}
    assert whole(levels={"ffn": [1]}, submodels=["ffn16"]) == {"heads"}


def test_empty_is_not_left_out(tiny_folder: Path) -> None:
    """No budgets are none; what needs one is refused, not taken from the profile."""
    assert plan(tiny_folder, board(), budgets={}).budgets == ()
    for name, empty in {"levels": {}, "buckets": [], "precisions": []}.items():
        with pytest.raises(PlanError, match=f"^{name.removesuffix('s')}s?: expected .*at least one"):
            plan(tiny_folder, board(), **{name: empty})


def test_a_plan_is_the_resolved_requests(tiny_folder: Path) -> None:
    made = plan(tiny_folder, board(), submodels=["ffn16-heads4"])
    assert made == resolve(CompileRequest(tiny_folder, board(), submodels=["ffn16-heads4"])).plan()
    assert made.candidates[-1].id == "ffn16-heads4"
    assert made.budgets == plan(tiny_folder, board()).budgets


def test_plan_is_public_and_needs_no_torch(tiny_folder: Path) -> None:
    assert nestforge.plan is plan
    assert nestforge.CompileRequest is CompileRequest
    program = (
        "import sys, nestforge, nestforge.bucket as bucket; "
        f"print(nestforge.plan({str(tiny_folder)!r}, 'raspberry-pi-5', buckets=[bucket.Bucket(1, 16)]).model); "
        "print([m for m in ('torch', 'transformers', 'onnx', 'onnx_ir') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{tiny_folder.name}\n[]\n"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"buckets": ["1by8"]},
            "bucket '1by8': expected BATCHxSEQUENCE, such as 1x128, or with a range, such as 1x1..128",
        ),
        (
            {"precisions": ["bf16"]},
            "precision: bf16 does not run on onnxruntime; expected some of " + ", ".join(run_by("onnxruntime")),
        ),
        (
            {"submodels": ["ffn7"]},
            "submodel 'ffn7': layers.0.ffn 7 is neither a multiple of 8, as the profile asks, nor the width of a "
            "level; nearest: 8",
        ),
        ({"exits": [0]}, "{folder}: exits: expected layers from 1 to 3, got 0"),
        ({"levels": {"wings": [1.0]}}, "levels: this model has no axis kind 'wings'; expected one of ffn, heads"),
    ],
)
def test_what_does_not_exist_or_fit_is_refused(tiny_folder: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as failure:
        resolve(CompileRequest(tiny_folder, board(), **wrong))
    assert str(failure.value) == message.replace("{folder}", str(tiny_folder))


@pytest.mark.parametrize("name", [one.name for one in fields(CompileRequest)])
def test_a_field_of_another_type_is_one_line(tiny_folder: Path, name: str) -> None:
    for wrong in (5, "x", b"x", [5], {"a": 5}, object()):
        with contextlib.suppress(NestforgeError):  # some are what one field takes
            plan(**{"model": tiny_folder, "profile": board(), name: wrong})


def test_buckets_are_written_as_on_the_command_line(tiny_folder: Path) -> None:
    written = resolve(CompileRequest(tiny_folder, board(), buckets=["1x8", "1..2x1..16"], budget_at="1x8")).profile
    assert written.buckets == (Bucket(1, 8), Bucket(2, 16, 1, 1))
    assert written.budget_at == Bucket(1, 8)


def test_without_measuring_this_host_is_as_any_other(tiny_folder: Path) -> None:
    here, there = replace(board(), host=host_profile().host), replace(board(), host="0123456789abcdef")
    assert resolve(CompileRequest(tiny_folder, here)).profile == here
    assert resolve(CompileRequest(tiny_folder, here, measure=False)).profile == board()
    assert resolve(CompileRequest(tiny_folder, there)).profile == there, "the bundle says whose profile it was made for"


def test_a_folder_that_states_no_end_of_texts_is_noted(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "llama", head_dim=8)
    line = "the model's folder states no eos_token_id: a text ends at a stop of the request's or at its `max_tokens`"
    assert line not in resolve(CompileRequest(folder, board(), generate=True)).notes
    (folder / "generation_config.json").write_text("{}")
    assert line in resolve(CompileRequest(folder, board(), generate=True)).notes
    assert line not in resolve(CompileRequest(folder, board())).notes


BERT = Path(__file__).parents[2] / "golden" / "peft" / "bert"
PROFILE = board(budgets={"full": {}}, buckets=["2x8"])
TASKS = {"a": BERT / "a"}


def test_a_source_takes_the_tasks_that_it_is_asked_for() -> None:
    job = resolve(CompileRequest(BERT / "base", PROFILE, tasks=TASKS, lora_rank=8, mergeable=True))
    assert job.source.tasks is not None
    assert job.tasks["a"].facts["filled with zeros"] == "rank 4 to 8"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mergeable": True}, "mergeable: expected tasks, which are merged into"),
        ({"tasks": TASKS, "precisions": ["fp32", "int8"]}, "task: engines with tasks are in fp32, requested fp32, int"),
        (
            {"tasks": TASKS, "profile": "jetson-orin-nano-8gb", "buckets": ["1x8"]},
            "task: engines with tasks are for onnxruntime",
        ),
    ],
)
def test_tasks_that_cannot_be_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        resolve(CompileRequest(**{"model": BERT / "base", "profile": PROFILE, **wrong}))


def asked(folder: Path, profile: Any = "raspberry-pi-5", **options: Any) -> nestforge.Plan:
    return nestforge.plan(folder, profile, buckets=[Bucket(1, 8)], generate=True, **options)


def test_what_cannot_generate_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"generate: narrow cannot: heads of size 4; expected a multiple of 8"):
        asked(save_decoder(tmp_path / "narrow"))
    decoder = save_decoder(tmp_path / "llama", head_dim=8)
    with pytest.raises(PlanError, match=r"in fp32 or an integer precision, requested fp16; .* takes longer in half"):
        asked(decoder, precisions=["fp16"])
    edit_config(decoder, architectures=["LlamaModel"])
    with pytest.raises(PlanError, match=r"generate: llama cannot; expected a causal language model"):
        asked(decoder)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"class_name": "T5EncoderModel"}, r"generate: t5 cannot; expected a causal language model"),
        ({"d_kv": 6}, r"generate: t5 cannot: heads of size 6; expected a multiple of 8"),
    ],
)
def test_an_encoder_decoder_that_cannot_is_refused_too(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(PlanError, match=line):
        asked(save_t5(tmp_path / "t5", text=False, **changes))


def test_what_tensorrt_cannot_run_is_refused(tmp_path: Path) -> None:
    device = board(backend="tensorrt")
    with pytest.raises(PlanError, match=r"for tensorrt KV-cache engines are in fp32 alone, requested fp16"):
        asked(save_decoder(tmp_path / "llama", head_dim=8), device, precisions=["fp16"])
    with pytest.raises(
        PlanError, match=r"submodel ffn32-coda.reduction3 cannot for tensorrt: its encoder selects a number of tokens"
    ):
        asked(save_tiny_pair(tmp_path / "pair"), device)


def test_notes_say_what_is_not_followed_and_what_has_not_run(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "llama", head_dim=8, eos_token_id=None)
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 4}))
    notes = asked(folder, board(backend="tensorrt", budgets={"full": {}})).notes
    for line in ("does not follow num_beams", "states no eos_token_id", "their plans have not run on a GPU yet"):
        assert sum(line in note for note in notes) == 1, line


def test_tokens_beyond_the_vocabulary_are_noted(tmp_path: Path) -> None:
    """As in a GPT-2 of another vocabulary, whose class has 50256 by default; transformers generates with it."""
    notes = asked(save_gpt2(tmp_path / "gpt2", n_embd=32, eos_token_id=50256, bos_token_id=50256)).notes
    assert (
        "the model's folder states eos_token_id 50256, bos_token_id 50256, beyond its vocabulary of 48 tokens: no such "
        "token can come"
    ) in notes
    assert (
        "the model's folder states no eos_token_id of its vocabulary: a text ends at a stop of the request's or at its "
        "`max_tokens`"
    ) in notes


def test_no_exits_are_told_from_every_exit(tmp_path: Path) -> None:
    """The last exit alone is another bundle than all of them: a compile of one does not go on as the other."""
    folder = save_tiny(tmp_path / "model")
    every, last = (resolve(CompileRequest(folder, board(), exits=exits)) for exits in (None, ()))
    assert (every.options.exits, last.options.exits) == (None, ())


def test_exit_layers_that_levels_leave_out_are_noted(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "model")
    levels = {"ffn": [0.5, 1]}
    note = "no submodel ends after layers [1]: `levels` leaves depth out, so that it stays whole"
    for further, is_noted in (
        ({"levels": levels}, True),
        ({"levels": levels | {"depth": [0.5, 1]}}, False),
        ({}, False),
    ):
        job = resolve(CompileRequest(folder, board(), exits=[1], **further))
        assert (note in job.notes, job.levels[0].submodel["depth"] == 1) == (is_noted, not is_noted)


def test_levels_are_those_that_a_plan_counts(tiny_folder: Path) -> None:
    levels, device = {"ffn": (0.5, 1.0)}, board(budgets={"full": {}})
    view = view_model(CompileRequest(tiny_folder, device, levels=levels, buckets=[Bucket(2, 8)]))
    made = plan(tiny_folder, device, levels=levels, buckets=[Bucket(2, 8)])
    source = open_source(tiny_folder)
    candidates = {candidate.id: candidate for candidate in made.candidates}
    assert [level.submodel for level in view.levels] == ["ffn32-heads4", "ffn64-heads4"]
    for level in view.levels:
        planned, submodel = candidates[level.submodel], source.spec.parse(level.submodel)
        assert (level.parameters, level.weight_bytes) == (planned.parameters, planned.weight_bytes)
        assert (level.non_embedding, level.ffn) == (planned.non_embedding_parameters, planned.ffn_parameters)
        assert level.flops == {"b2-s8": planned.costs[0].flops}
        assert level.macs == {"b2-s8": macs(source.workload(submodel, Bucket(2, 8)))}
    assert (view.kind, view.folder, view.profile, view.variants) == ("model", str(tiny_folder), "board", ())
    assert (view.axes, view.width_multiple, view.precisions) == (source.spec.axes, 8, ("fp32",))


def test_the_bytes_of_a_cache_are_those_that_its_engines_take(tmp_path: Path, tiny_folder: Path) -> None:
    sizes = {"head_dim": 8, "max_position_embeddings": 4096, "sliding_window": 512}
    folder, token = save_decoder(tmp_path / "m", "gemma2", **sizes), 4 * 2 * 2 * 8

    def seen(**changes: object) -> tuple[CacheSize, ...]:
        return view_model(CompileRequest(folder, board(**changes), buckets=[Bucket(1, 8)])).cache

    behind_a_window = (CacheSize(2048, token * (1024 + 2048)), CacheSize(4096, token * (1024 + 4096)))
    assert seen() == behind_a_window
    whole = (CacheSize(64, token * 2 * 64), CacheSize(4096, token * 2 * 4096))
    assert seen(backend="tensorrt", capacities=[64, 5000]) == whole
    assert view_model(CompileRequest(tiny_folder, board())).cache == (), "no language model"


def test_source_files_follow_their_bytes(tiniest: Path) -> None:
    assert source_entries(open_source(tiniest)) == source_entries(open_source(f"{tiniest}/"))


def test_versions_do_not_depend_on_which_distribution_brings_onnxruntime(monkeypatch) -> None:
    """onnxruntime-gpu brings the same module."""
    asked: list[str] = []
    known = metadata.version

    def version(name: str) -> str:
        asked.append(name)
        return known(name)

    monkeypatch.setattr(metadata, "version", version)
    versions = tool_versions()
    assert not [name for name in asked if name.startswith("onnxruntime")]
    assert versions["onnxruntime"] == known("onnxruntime")


def test_the_back_end_that_proves_engines_is_among_the_versions() -> None:
    assert tool_versions("openvino")["openvino"] == metadata.version("openvino")
    assert tool_versions("tensorrt") == tool_versions()
