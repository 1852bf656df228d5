"""A large model's class and options, tried on two layers: nothing of the model but its configuration is needed."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from nestforge.compiler.trial import trial
from nestforge.errors import BuildError, CheckpointError
from nestforge.profiles.budget import BudgetSpec
from nestforge.profiles.compile_request import CompileRequest
from support.commands import error_of, json_of, nestforge, usage_of
from support.tiny_compile import board

SEVEN_BILLION = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(tmp_path / "m", SEVEN_BILLION)


@pytest.fixture(autouse=True)
def kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def saved(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_whole_road_of_a_large_model(model: Path, kept_apart: Path, tmp_path: Path) -> None:
    levels, budgets = {"ffn": [0.5, 1.0]}, {"small": BudgetSpec(latency_ms=50)}
    settings: dict[str, Any] = {
        "levels": levels,
        "budgets": budgets,
        "precisions": ["fp32", "int4"],
        "buckets": ["1x1..8"],
        "slicing_table": "table.csv",
    }
    report = trial(CompileRequest(model, board(), tmp_path / "out", **settings))
    assert (report.model_class, report.family, report.axes) == ("Qwen2ForCausalLM", "gated_decoder", ("ffn",))
    assert report.changes["num_hidden_layers"] == (28, 2)
    assert report.changes["hidden_size"] == (3584, 64)
    assert report.submodels == ("ffn48.int4", "ffn48", "ffn96.int4", "ffn96")
    assert (report.engines, report.buckets, report.proofs) == (4, ("1x1..8",), ("slice",))
    assert report.untried == ("weights, sizes, latencies and memory", "`budgets`", "`slicing_table`")
    # Nothing is written but the report.
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["m", "temporary"]
    assert list(kept_apart.iterdir()) == []
    assert [path.name for path in model.iterdir()] == ["config.json"]


def test_options_that_fail_name_the_stage(model: Path, kept_apart: Path) -> None:
    with pytest.raises(BuildError, match=r"^trial of a small Qwen2ForCausalLM, at plan: precision int8: activ"):
        trial(CompileRequest(model, board(), precisions=["int8"], buckets=["1x4"]))
    assert list(kept_apart.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"auto_map": {"AutoModel": "mine.Model"}}, "auto_map: the folder brings code of its own"),
        ({"model_type": "cost_eff"}, "model_type 'cost_eff': a trial is of models of transformers alone"),
        ({"hidden_act": "mine"}, "Qwen2ForCausalLM cannot be made of it: KeyError"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        trial(CompileRequest(saved(tmp_path / "m", {**SEVEN_BILLION, **changes}), board()))


def test_what_the_true_sizes_refuse_is_refused(tmp_path: Path) -> None:
    """Though a small model would do."""
    bert = {"architectures": ["BertModel"], "model_type": "bert", "num_hidden_layers": 3, "intermediate_size": 96}
    odd = saved(tmp_path / "odd", {**bert, "hidden_size": 48, "num_attention_heads": 5})
    with pytest.raises(CheckpointError, match="BertModel cannot be made of it: ValueError: The hidden size"):
        trial(CompileRequest(odd, board()))
    even = saved(tmp_path / "even", {**bert, "hidden_size": 48, "num_attention_heads": 6})
    with pytest.raises(BuildError, match=r"exits: expected layers from 1 to 3, got 7"):
        trial(CompileRequest(even, board(), exits=[2, 7]))


def test_a_layer_of_each_kind_is_tried(tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = ["conv", "conv", "full_attention", "conv"]
    config = transformers.Lfm2Config(**sizes, num_hidden_layers=4, layer_types=kinds, architectures=["Lfm2ForCausalLM"])
    config.save_pretrained(tmp_path / "m")
    report = trial(CompileRequest(tmp_path / "m", board(), buckets=["1x8"], include="budgets"))
    assert report.axes == ("ffn", "heads")
    assert report.changes["num_hidden_layers"] == (4, 3)


def test_the_command_says_it_by_its_exit_code(tmp_path: Path) -> None:
    wide = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 28, "patch_size": 14}
    folder = saved(tmp_path / "v", {"architectures": ["Dinov2Model"], "model_type": "dinov2", **wide})
    stated = ["compile", folder, "--trial", "--profile", "laptop-x86", "--bucket", "1x1", "--levels", "heads=0.5,1"]
    data = json_of(*stated)
    assert (data["family"], data["axes"], data["engines"]) == ("general", ["ffn", "heads"], 2)
    assert "at plan: generate: " in error_of(*stated, "--generate")
    assert "at most one of --save and --trial" in usage_of(*stated, "--save", "job.yaml")
    lines = nestforge(*stated).stdout.splitlines()
    assert lines[0] == f"model       Dinov2Model (general), {folder}"
    assert lines[-1].startswith("the road works for this class and these options; it took ")
    assert not Path("model.bundle").exists()
