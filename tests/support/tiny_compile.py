"""A tiny model on its way through the compiler: a fixed foreign profile, and an engine builder over real files."""

from pathlib import Path
from typing import Any

import torch
from nestforge.bucket import Bucket
from nestforge.bundle.manifest import JobOptions, Quality, Ranking
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.engines.measure import measure_engines
from nestforge.compiler.engines.templates import TemplateKey, Templates
from nestforge.compiler.graph.make_template import traced_template
from nestforge.compiler.graph.store import read_store, write_store
from nestforge.compiler.graph.template import Template
from nestforge.compiler.parity.cases import parity_cases
from nestforge.compiler.parity.references import References
from nestforge.compiler.planning.levels import levels
from nestforge.compiler.planning.plan import make_plan
from nestforge.compiler.provenance import provenance_of
from nestforge.compiler.tensorrt.graphs import accepted
from nestforge.compiler.work.clock import Clock
from nestforge.compiler.work.staging import Stage
from nestforge.compiler.write_bundle import complete, partial_bundle, with_weights, write_build_record, write_manifest
from nestforge.exporters.universal import UniversalModel
from nestforge.profiles.device_profile import DeviceProfile, read_profile
from nestforge.progress import silent
from support.tiny_models import save_tiny_encoder

torch.set_num_threads(1)  # several threads on products this small only wait for each other

BUCKET = Bucket(2, 8)
# Beside tiny_models' defaults: two layers, two heads of 8, FFN 32.
TINY: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}


def save_tiniest(folder: Path, model_type: str = "bert", task: str = "Model", **overrides: Any) -> Path:
    """The smallest checkpoint that still has two layers and two heads."""
    return save_tiny_encoder(folder, model_type, task, **{**TINY, **overrides})


def board(**changes: Any) -> DeviceProfile:
    """A device that is not this host, so that nothing is measured and everything is predicted."""
    rates = {"gemm_gflops": 10, "batched_gemm_gflops": 5, "elementwise_gb_s": 5, "bandwidth_gb_s": 5}
    data: dict[str, Any] = {
        "schema_version": 1,
        "name": "board",
        "description": "a board that does not exist",
        "backend": "onnxruntime",
        "cores": 1,
        "memory_mb": 100,
        "rates": {**rates, "op_overhead_us": 1.0},
        "width_multiple": 8,
        "buckets": [BUCKET.label],
        "budgets": {"full": {}, "half": {"flops": "60 %"}},
    }
    return read_profile({**data, **changes}, "board")


def template_of(universal: UniversalModel, bucket: Bucket = BUCKET) -> Template:
    """The universal model, traced."""
    return traced_template(universal, universal.module, universal.source.signature, bucket, 20)


def builder_in(
    folder: Path, universal: UniversalModel, template: Template, profile: DeviceProfile, segments: bool = True
) -> EngineBuilder:
    """A builder whose staging folder is ``folder``: what ``compile_bundle`` has before it builds the first engine.

    ``segments``: of a model with exits, those between them can be built too.
    """
    stage = Stage(folder, folder / "work")
    stage.work.mkdir(parents=True)
    templates = Templates(universal, stage, profile)
    templates.known[TemplateKey(template.bucket, universal.spec.universal().structure)] = template
    for key in templates.keys([universal.spec.universal()], [template.bucket]) if segments else ():
        templates.get(key)
    weights = write_store(universal, templates.weights(), templates.tables(), folder)
    cases = parity_cases(universal.source.signature, template.bucket, universal.source.encoder)
    return EngineBuilder(
        references=References(universal, {template.bucket: cases}),
        profile=profile,
        templates=templates,
        store=read_store(weights, universal.spec),
        stage=stage,
        bundle=with_weights(
            partial_bundle(
                stage, universal.source, Ranking("none"), provenance_of(universal.source, profile, JobOptions())
            ),
            weights,
        ),
    )


def write_levels(builder: EngineBuilder, quality: dict[str, Quality] | None = None) -> Path:
    """A whole bundle of every level at the builder's bucket, as ``compile_bundle`` writes it before it verifies."""
    source, profile = builder.universal.source, builder.profile
    steps = levels(source.spec, profile.levels, profile.width_multiple)
    plan = make_plan(source, profile, levels=steps)
    chosen = [step.submodel for step in steps]
    engines = [builder.build(submodel, bucket) for submodel in chosen for bucket in profile.buckets]
    latencies = measure_engines(builder, engines, {}, Clock(silent))
    completed = complete(builder.bundle, plan, chosen, engines, quality or {}, latencies)
    manifest = write_manifest(builder.stage, completed, ())
    clock = Clock(silent)
    clock.seconds["build"] = clock.cpu_seconds["build"] = 1.5
    write_build_record(builder.stage, manifest, ["nestforge", "compile"], clock, latencies)
    return builder.stage.folder


def assert_tensorrt_takes(folder: Path) -> None:
    """Every graph in ``folder``: operators, types and shapes, by the parser's own table. Raises BuildError."""
    graphs = sorted(folder.glob("*.onnx"))
    assert graphs
    for graph in graphs:
        accepted(graph.name, graph.read_bytes())
