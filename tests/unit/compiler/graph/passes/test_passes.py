"""Every pass of the table on traced graphs: what it requires and ensures holds, and the graph's function stays."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.generation_entry import CACHED
from nestforge.compiler.engines.templates import Templates
from nestforge.compiler.graph import make_template
from nestforge.compiler.graph.make_template import PASSES
from nestforge.compiler.graph.passes.contract import Given, Pass
from nestforge.compiler.work.staging import Stage
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from onnx_ir.passes.common import NameFixPass
from support.gated_decoders import save_decoder
from support.tiny_compile import board, save_tiniest
from support.tiny_mixer import save_tiny_mixer
from support.tiny_models import save_tiny_vit

# By kind of graph, a model that has it: an encoder, one with masks that hide nothing, experts in stacked weights, and a
# decoder over a cache.
MODELS: dict[str, Callable[[Path], Path]] = {
    "encoder": partial(save_tiniest, num_hidden_layers=1),
    "vision": save_tiny_vit,
    "experts": save_tiny_mixer,
    "decoder": lambda folder: save_decoder(folder, "llama", head_dim=16, num_hidden_layers=1),
}
SIZES = {"batch": 1, "sequence": 3, "capacity": 11, "answers": 2}


# No graph here needs these; their own tests show them at work.
IDLE = {"note_modules", "drop_open_masks", "fold_tables", "fuse_rotary", "rows_as_weights", "take_parts"}


@dataclass
class Report:
    """Effect of one pass on each kind of graph: whether it changed it, and what of its contract it broke."""

    changed: dict[str, bool] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """By pass. The graphs go through the table as a compile sends them."""
    found = {step.name: Report() for step in PASSES}
    for kind, save in MODELS.items():
        folder = tmp_path_factory.mktemp(kind)
        source = replace(open_source(save(folder / "model")), generates=kind == "decoder")
        universal = load_universal(source)
        part = source.parts.get(CACHED)
        static = Bucket(2, 16) if kind != "vision" else Bucket(2, 1)
        bucket = static if part is None else part.at(static)
        with pytest.MonkeyPatch.context() as patch:
            steps = make_template.passes_for
            patch.setattr(
                make_template,
                "passes_for",
                lambda model, fuses, steps=steps, kind=kind: [
                    replace(step, run=watched(step, kind, found[step.name])) for step in steps(model, fuses)
                ],
            )
            templates = Templates(universal, Stage(folder, folder), board())
            templates.traced(universal.spec.universal(), bucket, None if part is None else CACHED)
    return found


def watched(step: Pass, kind: str, report: Report) -> Callable[[ir.Model, Given], bool]:
    """``step``, held to its contract."""

    def run(model: ir.Model, given: Given) -> bool:
        problems = [f"requires {one.__name__}: {what}" for one in step.requires if (what := one(model, given))]
        expected = answers(model)  # first: fixing names of a copy also names tensors that the two share
        before = content(model)
        changed = step.run(model, given)
        after = content(model)
        problems += [f"ensures {one.__name__}: {what}" for one in step.ensures if (what := one(model, given))]
        if changed != (before != after):
            problems.append(f"returned {changed} of a graph that is {'the same' if before == after else 'another'}")
        if interface(before) != interface(after):
            problems.append("inputs or outputs are others")
        if step.is_idempotent and (step.run(model, given) or content(model) != after):
            problems.append("changes its own result")
        for name, value in answers(model).items():
            if not np.allclose(value, expected[name], rtol=1e-4, atol=1e-4):
                problems.append(f"{name} is off by {np.abs(value - expected[name]).max()}")
        report.changed[kind] = changed
        report.broken += [f"{kind}: {problem}" for problem in problems]
        return changed

    return run


def content(model: ir.Model) -> onnx.ModelProto:
    """The graph without the names of its constants' tensors, which writing it gives them."""
    proto = ir.to_proto(model)
    for node in proto.graph.node:
        for attribute in node.attribute:
            attribute.t.ClearField("name")
    return proto


def interface(proto: onnx.ModelProto) -> list[tuple[str, bytes]]:
    return [(value.name, value.type.SerializeToString()) for value in (*proto.graph.input, *proto.graph.output)]


def answers(model: ir.Model) -> dict[str, np.ndarray]:
    """Outputs by name; ONNX Runtime opens a graph only where it is valid. Names may meet until the graph is tidied."""
    named = model.clone()
    NameFixPass()(named)
    proto = ir.to_proto(named)
    rng, feeds = np.random.default_rng(0), {}
    for value in proto.graph.input:
        shape = [SIZES.get(dim.dim_param, dim.dim_value) for dim in value.type.tensor_type.shape.dim]
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        numbers = rng.standard_normal(shape) if np.dtype(kind).kind == "f" else rng.integers(0, 2, shape)
        feeds[value.name] = numbers.astype(kind)
    if "attention_mask" in feeds:
        feeds["attention_mask"][:, 0] = 1
    if "past_key_0" in feeds:  # behind five tokens that the cache has
        feeds["position_ids"] = np.arange(5, 8)[None]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.parametrize("step", PASSES, ids=lambda step: step.name)
def test_a_pass_keeps_its_contract(step: Pass, reports: dict[str, Report]) -> None:
    report = reports[step.name]
    assert report.broken == []
    assert any(report.changed.values()) != (step.name in IDLE)
    assert report.changed.keys() == (MODELS.keys() if step.graphs == "all" else {"decoder"})
