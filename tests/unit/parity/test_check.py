"""The check as a user runs it: right exports pass, broken ones fail with the module and the kind of fault, and what
cannot be judged is one line and exit code 2. The whole zoo is ``make parity-zoo``."""

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import nestforge
import numpy as np
import onnx
import pytest
import torch
import transformers
from click.testing import CliRunner
from nestforge.compiler.parity.compare import Rounding
from nestforge.errors import CheckpointError, InputError
from nestforge.parity import verdict
from nestforge.parity.model import open_model
from nestforge.parity.verdict import Rule, simulated
from nestforge.profiles.precision import PRECISIONS, TRACED, Encoding, Precision
from nestforge.tools.cli import main
from support.export_recipes import RECIPES
from support.exports import Recipe, Zoo, quiet

# A few of the zoo, for what each is about.
RIGHT = ("gpt2", "vit", "mean", "bert int8", "bert renamed")
WRONG = (
    "bias dropped, nameless",
    "mask ignored",
    "one tensor as example of two inputs",
    "frozen length",
    "wrong pooling",
    "Dense skipped",
    "Normalize skipped",
    "stale revision",
    "layer skipped",
)


def named(name: str) -> Recipe:
    return next(recipe for recipe in RECIPES if recipe.name == name)


@pytest.mark.parametrize("name", RIGHT)
def test_right_exports_pass(zoo: Zoo, name: str) -> None:
    recipe = named(name)
    report = nestforge.check_parity(zoo.export(recipe), zoo.model(recipe.family))
    assert report.is_right, report.line
    assert report.line.startswith("PARITY OK")


@pytest.mark.parametrize("name", WRONG)
def test_broken_exports_are_found_and_the_fault_is_named(zoo: Zoo, name: str) -> None:
    recipe = named(name)
    report = nestforge.check_parity(zoo.export(recipe), zoo.model(recipe.family))
    assert not report.is_right
    fault = report.graphs[0].fault
    assert fault.module in recipe.at, report.line
    assert recipe.kind in fault.kind, report.line
    assert report.line.startswith("PARITY BROKEN")


def test_a_fault_is_found_level_by_level_where_values_are_many(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestforge.parity.values._MOST_NUMBERS", 1)
    recipe = named("bias dropped, nameless")
    fault = nestforge.check_parity(zoo.export(recipe), zoo.model(recipe.family)).graphs[0].fault
    assert fault.module in recipe.at
    assert "encoder.layer.1.attention" not in dict(fault.errors)  # a layer that nobody had to look into


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["parity", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_exit_code_says_the_verdict(zoo: Zoo) -> None:
    model = zoo.model("bert")
    code, said = run(zoo.export(named("bert")), "--against", model)
    assert code == 0
    assert said.splitlines()[-1].startswith("PARITY OK")
    code, said = run(zoo.export(named("bias dropped")), "--against", model, "--json")
    assert code == 1
    report = json.loads(said[said.index("{") :])
    assert report["graphs"][0]["fault"]["module"] == "encoder.layer.1.attention.self.value"


def test_users_accept_what_they_accept(zoo: Zoo) -> None:
    export, model = zoo.export(named("epsilon")), zoo.model("bert")
    assert nestforge.check_parity(export, model, preset="deploy").is_right
    assert nestforge.check_parity(export, model, tolerance=1e-2).is_right
    int8 = zoo.export(named("bert int8"))
    assert not nestforge.check_parity(int8, model, preset="strict").is_right


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tolerance": float("nan")}, "tolerance: expected"),
        ({"tolerance": 0.0}, "tolerance: expected"),
        ({"seed": -1}, "seed: expected"),
        ({"tolerance": 1.0, "preset": "deploy"}, "`tolerance` and `preset`"),
        ({"map": {"zzz": "input_ids"}}, "the export has input_ids"),
    ],
)
def test_settings_that_would_be_ignored_or_mean_nothing_are_refused(
    zoo: Zoo, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        nestforge.check_parity(zoo.export(named("bert")), zoo.model("bert"), **settings)


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != TRACED])
def test_every_lower_precision_rounds(precision: Precision) -> None:
    torch.manual_seed(0)
    net, given = torch.nn.Linear(8, 4), torch.randn(2, 8)
    with simulated(precision):
        found = net(given)
    difference = (found - net(given)).abs().max().item()
    assert 0 < difference < 0.5


def test_float16_weights_are_rounded_and_nothing_else() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 4))
    ids = torch.arange(9)[None]
    with simulated("fp16-weights"):
        found = net(ids)
    with torch.no_grad():
        for weight in (net[0].weight, net[1].weight):
            weight.copy_(weight.half().float())
        assert torch.equal(found, net(ids))


def test_a_new_precision_rounds_by_its_entry_in_the_table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, table in {"WEIGHT_BITS": {".int3": 3}, "BLOCK_INPUTS": {".int3": 32}}.items():
        monkeypatch.setattr(verdict, name, {**getattr(verdict, name), **table})
    of_int4 = PRECISIONS["int4"]
    monkeypatch.setattr(verdict, "PRECISIONS", {"int3": replace(of_int4, encoding=cast(Encoding, ".int3"))})
    torch.manual_seed(0)
    net, given = torch.nn.Linear(64, 4, bias=False), torch.eye(64)
    with simulated(cast(Precision, "int3")):
        found = net(given)  # [in, out]: its weights
    assert max(len(column.unique()) for column in found.T) == 8
    assert 0 < (found - net.weight.T).abs().max() < 0.3 * net.weight.abs().max()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_ids": np.full((1, 6), 99_999)}, "refuses them"),
        ({"mine": np.zeros(1)}, "takes no mine"),
        ({"token_type_ids": None}, "lacks token_type_ids"),
    ],
)
def test_arrays_that_cannot_be_a_case_are_refused(zoo: Zoo, change: dict[str, Any], said: str) -> None:
    names = ("input_ids", "attention_mask", "token_type_ids")
    arrays = {**{name: np.ones((1, 6), np.int64) for name in names}, **change}
    given = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(InputError, match=said):
        nestforge.check_parity(zoo.export(named("bert")), zoo.model("bert"), inputs=given)


def test_a_module_of_the_users_own_is_the_reference(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.first(x)))

    net = Net().eval()
    path = tmp_path / "net.onnx"
    with quiet():
        torch.onnx.export(net, (torch.randn(1, 8),), str(path), dynamo=False, input_names=["x"], output_names=["y"])
    assert nestforge.check_parity(path, net).is_right
    net.last.bias.data += 1
    report = nestforge.check_parity(path, net)
    assert report.graphs[0].fault.module == "last"
    net.last = torch.nn.Linear(16, 5)
    report = nestforge.check_parity(path, net, map={"y": "output_0"})
    assert "output_0; it looks like another shape: [1, 4] in the place of [1, 5]" in str(report.graphs[0].fault)


def test_a_pass_in_float64_holds_few_weights_at_once() -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(16)))
    model, alive = open_model(module), [0]

    def wide() -> dict[int, int]:
        tensors = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
        return {each.data_ptr(): each.nbytes for each in tensors if each.dtype == torch.float64}

    def count(*_: object) -> None:
        alive.append(sum(size for place, size in wide().items() if place not in before))

    gc.collect()  # what other tests left
    before = wide()
    hooks = [part.register_forward_hook(count) for part in module]
    answer = model.wide_answer({"input": np.ones((1, 128), np.float32)})["output_0"]
    for hook in hooks:
        hook.remove()
    assert np.array_equal(answer, module.double()(torch.ones(1, 128, dtype=torch.float64)).detach().numpy())
    assert 0 < max(alive) < 4 * module[0].weight.nbytes  # of 16, in float64


class Table(torch.nn.Module):
    """Tokens and positions of a larger vocabulary than random cases cover."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = torch.nn.Embedding(9000, 8), torch.nn.Embedding(700, 8)
        self.head = torch.nn.Linear(8, 4)
        self.config = transformers.PretrainedConfig(vocab_size=9000, max_position_embeddings=700)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(input_ids) + self.places(torch.arange(input_ids.shape[1])))


def exported(module: torch.nn.Module, path: Path, length: int = 8) -> Path:
    ids = torch.ones(1, length, dtype=torch.int64)
    axes = {"input_ids": {0: "batch", 1: "sequence"}}
    with quiet():
        torch.onnx.export(
            module, (ids,), str(path), dynamo=False, input_names=["input_ids"], output_names=["y"], dynamic_axes=axes
        )
    return path


@pytest.mark.parametrize(("table", "rows", "case"), [("words", [7000, 8000], "tokens"), ("places", [640, 690], "700")])
def test_rows_that_random_cases_miss_are_looked_up(tmp_path: Path, table: str, rows: list[int], case: str) -> None:
    module = Table()
    path = exported(module, tmp_path / "right.onnx")
    assert nestforge.check_parity(path, module).is_right
    weight = getattr(module, table).weight.data
    weight[rows] = weight[rows[::-1]]
    report = nestforge.check_parity(path, module)
    graph = report.graphs[0]
    assert [case in figure.case for figure in graph.figures if not figure.is_right] == [True]
    assert graph.fault.module == table
    assert f"2 of {len(weight)} rows" in graph.fault.kind


@pytest.mark.parametrize("broadcasts", [False, True])
def test_a_length_that_no_case_has_is_found_where_it_is_frozen(tmp_path: Path, broadcasts: bool) -> None:
    class Frozen(Table):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            found = super().forward(input_ids)
            return found + torch.zeros(11, 4) if broadcasts else found.reshape(1, 11, 4)

    report = nestforge.check_parity(exported(Frozen(), tmp_path / "frozen.onnx", 11), Table())
    assert not report.is_right
    fault = report.graphs[0].fault
    assert broadcasts or "only 11 is right" in fault.kind


def test_an_export_behind_a_link_is_read_as_the_file_is(tmp_path: Path) -> None:
    """As a cache of downloads lays it out: large weights inside the file, and a link to that."""
    module = Table()
    exported(module, tmp_path / "blob.onnx")
    (tmp_path / "model.onnx").symlink_to(tmp_path / "blob.onnx")
    assert nestforge.check_parity(tmp_path / "model.onnx", module).is_right
    module.words.weight.data[[7000, 8000]] = module.words.weight.data[[8000, 7000]]
    (graph,) = nestforge.check_parity(tmp_path / "model.onnx", module).graphs
    assert graph.fault.module == "words"


@pytest.mark.parametrize("preset", ["strict", "deploy"])
def test_a_model_whose_answers_are_no_numbers_proves_nothing(preset: Literal["strict", "deploy"]) -> None:
    rule, bad = Rule("fp32", 1, preset=preset), np.array([[1.0, np.nan]])
    for found in (np.ones((1, 2)), bad):
        assert not rule.judge("one", "logits", bad, found.astype(np.float32), Rounding()).is_right
    assert rule.judge("one", "logits", np.ones((1, 2)), np.ones((1, 2), np.float32), Rounding()).is_right


def saved(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


def test_what_cannot_be_judged_is_one_line_and_two(zoo: Zoo, tmp_path: Path) -> None:
    model = zoo.model("bert")
    (tmp_path / "no.onnx").write_bytes(b"not a graph")
    good = onnx.load(zoo.export(named("bert")))
    unknown = onnx.ModelProto()
    unknown.CopyFrom(good)
    unknown.graph.node[0].op_type, unknown.graph.node[0].domain = "Nobody", "no.such.domain"
    outside = onnx.ModelProto()
    outside.CopyFrom(good)
    tensor = next(t for t in outside.graph.initializer if t.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../weights.bin")
    lost = onnx.ModelProto()
    lost.CopyFrom(outside)
    next(t for t in lost.graph.initializer if t.external_data).external_data[0].value = "lost.bin"
    nowhere = onnx.ModelProto()
    nowhere.CopyFrom(lost)
    next(t for t in nowhere.graph.initializer if t.external_data).external_data.add(key="offset", value="-5")
    linked = onnx.ModelProto()
    linked.CopyFrom(lost)
    next(t for t in linked.graph.initializer if t.external_data).external_data[0].value = "linked.bin"
    (tmp_path / "linked.bin").symlink_to(zoo.export(named("bert")))
    odd = onnx.ModelProto()
    odd.CopyFrom(good)
    for node in odd.graph.node:
        node.input[:] = ["mystery" if name == "token_type_ids" else name for name in node.input]
    next(value for value in odd.graph.input if value.name == "token_type_ids").name = "mystery"
    for export, expected in {
        tmp_path / "missing.onnx": "no such file",
        tmp_path / "no.onnx": "is no ONNX file",
        saved(unknown, tmp_path / "unknown.onnx"): "`--library` loads operators",
        saved(outside, tmp_path / "outside.onnx"): "lies outside its folder",
        saved(lost, tmp_path / "lost.onnx"): "is missing",
        saved(nowhere, tmp_path / "nowhere.onnx"): "'-5'",
        saved(linked, tmp_path / "linked.onnx"): "lies outside its folder",
        saved(odd, tmp_path / "odd.onnx"): "--map mystery=NAME",
        zoo.export(named("vit")): "matches no input of the model",
    }.items():
        code, said = run(export, "--against", model)
        assert code == 2, said
        assert expected in said
        assert "Traceback" not in said
    assert run(tmp_path / "odd.onnx", "--against", model, "--map", "mystery=token_type_ids")[0] == 0


def test_a_model_that_brings_code_is_refused(zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoModel": "mine.Model"}}')
    (tmp_path / "model.safetensors").write_bytes((zoo.model("bert") / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="never run"):
        nestforge.check_parity(zoo.export(named("bert")), tmp_path)
    with pytest.raises(InputError, match="expected"):
        nestforge.check_parity(tmp_path, zoo.model("bert"))
