"""Every module has a test of its own name, or a line here that says which one tests it.

``TESTED_ELSEWHERE``: the test file mentions the module, or a public name of nestforge that comes from it.
``TESTED_THROUGH``: the test file mentions the module named beside it, and that one imports the module itself.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from nestforge import _HOMES

ROOT = Path(__file__).resolve().parents[2]
TESTS = Path(__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for layer in ("profiles", "runtime", "integrations", "exporters", "compiler")
    for path in sorted((ROOT / layer).rglob("*.py"))
}
FAMILIES = {module for module in MODULES if module.startswith("exporters.families.") and module.endswith("family")}
TESTED_ELSEWHERE = {
    "compiler.add_task": "compiler/tasks/test_coda_tasks.py",
    "compiler.tasks.add_tasks": "compiler/tasks/test_coda_tasks.py",
    "exporters.for_tasks.with_tasks": "compiler/tasks/test_task_layout.py",
    "exporters.tasks.adapter_config": "exporters/tasks/test_adapter_folder.py",
    "exporters.tasks.task_form": "compiler/tasks/test_task_layout.py",
    "runtime.bundle.merged_task": "runtime/graphs/test_merged_weights.py",
    "runtime.bundle.entries.task_entry": "runtime/bundle/test_check_tasks.py",
    "runtime.graphs.task_tensors": "runtime/test_tasks.py",
    "runtime.answer": "runtime/test_model.py",
    "runtime.bundle.build_record": "runtime/bundle/test_bundle_format.py",
    "runtime.bundle.entries.engine_entry": "runtime/bundle/test_manifest.py",
    "runtime.bundle.entries.generation_entry": "runtime/bundle/test_check_generation.py",
    "runtime.bundle.entries.tensor_spec": "runtime/bundle/test_manifest.py",
    "runtime.bundle.private_files": "runtime/engines/tensorrt/test_plans.py",
    "runtime.bundle.read_manifest": "runtime/bundle/test_bundle_format.py",
    "runtime.calibrate.fit": "runtime/calibrate/test_calibrate.py",
    "runtime.consistency.array_samples": "runtime/consistency/test_samples.py",
    "runtime.device.cuda_memory": "runtime/engines/tensorrt/test_bound.py",
    "runtime.engines.tensorrt.available": "runtime/engines/tensorrt/test_plans.py",
    "runtime.generation.any_cache": "runtime/generation/test_device_cache.py",
    "compiler.parity.evidence.cached_runs": "compiler/generation/test_build_cached.py",
    "runtime.generation.cached_engine": "compiler/generation/test_build_cached.py",
    "runtime.generation.calls.generated": "runtime/generation/loop/test_generation.py",
    "runtime.generation.calls.options": "runtime/generation/loop/test_generator.py",
    "runtime.inputs.arrays": "compiler/tensorrt/test_check_plan.py",
    "runtime.summary.table": "runtime/summary/test_short_names.py",
    "runtime.request": "runtime/test_dispatcher.py",
    "runtime.retrieval.identity": "runtime/retrieval/test_index_file.py",
    "profiles.cgroups": "profiles/test_probe_host.py",
    "profiles.tensorrt_options": "profiles/test_profile_data.py",
    "exporters.families.coda.architecture.inputs": "exporters/families/coda/model/test_embeddings.py",
    "exporters.families.coda.model.adapters": "exporters/families/coda/model/test_layer.py",
    "exporters.families.coda.conversion.settings": "exporters/families/coda/conversion/test_convert.py",
    "exporters.families.coda.folder": "exporters/families/coda/test_family.py",
    "exporters.families.coda_encoder_decoder.folder": "exporters/families/coda_encoder_decoder/test_family.py",
    "exporters.families.cost_eff.entropy": "exporters/families/cost_eff/test_model.py",
    "exporters.families.cost_eff.sidecar": "exporters/families/cost_eff/test_folder.py",
    "exporters.families.t5.generating": "compiler/generation/test_encoder_decoder.py",
    "exporters.families.t5.load": "exporters/families/t5/test_family.py",
    "exporters.families.cost_eff.tsvd": "exporters/families/cost_eff/test_model.py",
    "exporters.families.cost_eff.weights": "exporters/families/cost_eff/test_family.py",
    "exporters.families.mhe.architecture.folded_shapes": "exporters/families/mhe/architecture/test_shapes.py",
    "exporters.families.mhe.architecture.forward_ops": "exporters/families/mhe/architecture/test_attention_ops.py",
    "exporters.families.mhe.folder": "exporters/families/mhe/test_encoder_family.py",
    "exporters.families.mhe.model.answering": "exporters/families/mhe/model/test_forms.py",
    "exporters.families.mhe.model.folds": "exporters/families/mhe/model/test_forms.py",
    "exporters.families.mhe.model.lower": "exporters/families/mhe/model/test_forms.py",
    "exporters.families.mhe.model.turned": "exporters/families/mhe/model/test_layout.py",
    "exporters.families.mhe.model.generating": "exporters/families/mhe/test_decoder_family.py",
    "exporters.folded": "exporters/families/mhe/test_encoder_family.py",
    "exporters.families.matformer.architecture.language_presets": (
        "exporters/families/matformer/architecture/test_config.py"
    ),
    "exporters.families.matformer.architecture.shapes": "exporters/families/matformer/architecture/test_presets.py",
    "exporters.families.matformer.architecture.vision_presets": (
        "exporters/families/matformer/architecture/test_config.py"
    ),
    "exporters.families.matformer.folder": "exporters/families/matformer/test_language_family.py",
    "exporters.families.matformer.model.nested_ffn": "exporters/families/matformer/model/test_language_model.py",
    "exporters.families.matformer.model.vision_model": "exporters/families/matformer/test_vision_family.py",
    "exporters.families.sparse_mixer.model.answering": "exporters/families/sparse_mixer/model/test_lower.py",
    "exporters.family": "exporters/test_presets.py",
    "exporters.hugging_face.cached_decoder": "compiler/generation/test_build_cached.py",
    "exporters.modules.cached_attention": "compiler/generation/test_build_cached.py",
    "exporters.modules.attention": "exporters/families/sparse_mixer/model/test_attention.py",
    "exporters.sentence_transformers.head": "exporters/sentence_transformers/test_vectors.py",
    "exporters.sentence_transformers.modules": "exporters/sentence_transformers/test_vectors.py",
    "exporters.sentence_transformers.read_module": "exporters/sentence_transformers/test_vectors.py",
    "exporters.routing": "compiler/parity/evidence/test_reference.py",
    "exporters.signature": "exporters/tracing/test_trace.py",
    "exporters.source": "exporters/test_hugging_face_classes.py",
    "exporters.universal": "exporters/test_ranking.py",
    "compiler.generation.cached_gate": "compiler/generation/test_build_cached.py",
    "compiler.compile": "compiler/test_choice_axes.py",
    "compiler.graph.passes.dims_by_operator": "compiler/graph/passes/test_free_elastic_dims.py",
    "compiler.graph.node_extents": "compiler/graph/precision/test_cpu_kernels.py",
    "compiler.planning.candidate": "compiler/planning/test_plan.py",
    "compiler.graph.emit": "compiler/graph/test_template.py",
    "compiler.graph.make_template": "compiler/graph/test_template.py",
    "compiler.parity.engine_verdict": "compiler/parity/evidence/test_reference.py",
    "compiler.parity.evidence.replayed": "compiler/parity/test_judge.py",
    "compiler.tensorrt.build_plan": "compiler/tensorrt/test_build_bundle.py",
    "compiler.tensorrt.float_sums": "compiler/tensorrt/test_operators.py",
    "compiler.tensorrt.graphs": "compiler/tensorrt/test_build_bundle.py",
    "compiler.tensorrt.layers": "compiler/tensorrt/test_small_parts.py",
    "compiler.tensorrt.profile_shapes": "compiler/tensorrt/test_small_parts.py",
    "compiler.tensorrt.progress": "compiler/tensorrt/test_build_bundle.py",
    "compiler.tensorrt.trtexec": "compiler/tensorrt/test_small_parts.py",
    "compiler.parity.evidence.segment_references": "compiler/parity/evidence/test_references.py",
}
TESTED_THROUGH = {
    "runtime.engines.onnxruntime.task_inputs": ("runtime/test_tasks.py", "runtime.engines.onnxruntime.runner"),
    "exporters.families.coda.task_form": (
        "exporters/families/coda/test_family.py",
        "exporters.families.coda.family",
    ),
    "compiler.build.merging": ("compiler/tasks/test_merged_tasks.py", "compiler.compile"),
    "compiler.tasks.prove_task": ("compiler/tasks/test_coda_tasks.py", "compiler.tasks.add_tasks"),
    "compiler.tasks.verify_tasks": ("compiler/test_verify.py", "compiler.verify"),
    "exporters.families.coda.conversion.dense": (
        "exporters/families/coda/conversion/test_convert.py",
        "exporters.families.coda.conversion.convert",
    ),
    "exporters.families.coda.conversion.from_bert": (
        "exporters/families/coda/conversion/test_convert.py",
        "exporters.families.coda.conversion.convert",
    ),
    "exporters.families.coda.conversion.from_t5": (
        "exporters/families/coda/conversion/test_convert.py",
        "exporters.families.coda.conversion.convert",
    ),
    "exporters.families.coda.conversion.from_vit": (
        "exporters/families/coda/conversion/test_convert.py",
        "exporters.families.coda.conversion.convert",
    ),
    "exporters.families.coda.model.norms": (
        "exporters/families/coda/model/test_layer.py",
        "exporters.families.coda.model.layer",
    ),
    "runtime.bundle.entries.exits_entry": ("runtime/bundle/test_check_exits.py", "runtime.bundle.manifest"),
    "runtime.bundle.device_files.sealed_file": ("runtime/exits/test_calibration.py", "runtime.exits.calibration"),
    "compiler.generation.draft_entry": ("compiler/publish/test_write_bundle.py", "compiler.publish.write_bundle"),
    "compiler.generation.verify_cached": ("compiler/test_verify.py", "compiler.verify"),
    "compiler.graph.passes.matching": (
        "compiler/graph/passes/cached/test_fuse_norms.py",
        "compiler.graph.passes.cached.fuse_norms",
    ),
    "runtime.device.token_arrays": ("runtime/generation/test_device_cache.py", "runtime.generation.device_cache"),
    "runtime.generation.sources.any_source": (
        "runtime/generation/sources/test_device_source.py",
        "runtime.generation.sources.device_source",
    ),
    "runtime.generation.calls.asked_rows": (
        "runtime/generation/loop/test_generator.py",
        "runtime.generation.loop.generator",
    ),
    "runtime.generation.calls.writers": (
        "runtime/generation/loop/test_generator.py",
        "runtime.generation.loop.generator",
    ),
    "profiles.device_profile": ("profiles/test_profile_data.py", "profiles.profile_data"),
    "runtime.answering": ("runtime/test_model.py", "runtime.model"),
    "runtime.texts": ("runtime/test_model.py", "runtime.model"),
    "runtime.engines.onnxruntime_gpu.session": (
        "runtime/engines/onnxruntime_gpu/test_runner.py",
        "runtime.engines.onnxruntime_gpu.runner",
    ),
    "runtime.engines.tensorrt.engine": ("runtime/engines/tensorrt/test_runner.py", "runtime.engines.tensorrt.runner"),
    "runtime.engines.tensorrt.cache_context": (
        "runtime/engines/tensorrt/test_cached_runner.py",
        "runtime.engines.tensorrt.cached_runner",
    ),
    "runtime.engines.tensorrt.cache_run": (
        "runtime/engines/tensorrt/test_cached_runner.py",
        "runtime.engines.tensorrt.cached_runner",
    ),
    "runtime.engines.tensorrt.open_plan": (
        "runtime/engines/tensorrt/test_runner.py",
        "runtime.engines.tensorrt.runner",
    ),
    "runtime.generation.cache_memory": (
        "runtime/generation/calls/test_session_memory.py",
        "runtime.generation.calls.session_memory",
    ),
    "runtime.engines.tensorrt.execution_context": (
        "runtime/engines/tensorrt/test_runner.py",
        "runtime.engines.tensorrt.runner",
    ),
    "runtime.exits.choice": ("runtime/test_model_exits.py", "runtime.model"),
    "runtime.exits.segments": ("runtime/exits/test_chain.py", "runtime.exits.chain"),
    "runtime.exits.workspace": ("runtime/exits/test_host_workspace.py", "runtime.exits.host_workspace"),
    "runtime.retrieval.encode": ("runtime/retrieval/test_index.py", "runtime.retrieval.index"),
    "exporters.architecture": ("exporters/families/bert/test_family.py", "exporters.source"),
    "exporters.checkpoints.elastic_config": (
        "exporters/families/sparse_mixer/test_folder.py",
        "exporters.families.sparse_mixer.architecture.config",
    ),
    "exporters.exits": ("exporters/families/cost_eff/test_family.py", "exporters.source"),
    "exporters.families.bert.architecture": (
        "exporters/families/bert/test_family.py",
        "exporters.families.bert.family",
    ),
    "exporters.families.bert.heads": ("exporters/families/bert/test_family.py", "exporters.families.bert.family"),
    "exporters.families.bert.layouts": ("exporters/families/bert/test_family.py", "exporters.families.bert.family"),
    "exporters.families.bert.load": ("exporters/families/bert/test_family.py", "exporters.families.bert.family"),
    "exporters.families.cost_eff.architecture": (
        "exporters/families/cost_eff/test_family.py",
        "exporters.families.cost_eff.family",
    ),
    "exporters.families.cost_eff.forward_ops": (
        "exporters/families/cost_eff/test_family.py",
        "exporters.families.cost_eff.family",
    ),
    "exporters.families.cost_eff.prove_load": (
        "exporters/families/cost_eff/test_family.py",
        "exporters.families.cost_eff.family",
    ),
    "exporters.families.cost_eff.read_architecture": (
        "exporters/families/cost_eff/test_folder.py",
        "exporters.families.cost_eff.family",
    ),
    "exporters.families.cost_eff.segments": (
        "exporters/families/cost_eff/test_compile.py",
        "exporters.families.cost_eff.family",
    ),
    "exporters.families.gated_decoder.architecture": (
        "exporters/families/gated_decoder/test_compile.py",
        "exporters.families.gated_decoder.family",
    ),
    "exporters.families.gated_decoder.forward_ops": (
        "exporters/families/gated_decoder/test_compile.py",
        "exporters.families.gated_decoder.family",
    ),
    "exporters.families.gated_decoder.layouts": (
        "exporters/families/gated_decoder/test_compile.py",
        "exporters.families.gated_decoder.family",
    ),
    "exporters.families.gated_decoder.load": (
        "exporters/families/gated_decoder/test_compile.py",
        "exporters.families.gated_decoder.family",
    ),
    "exporters.families.gated_decoder.nesting": (
        "exporters/families/gated_decoder/test_compile.py",
        "exporters.families.gated_decoder.family",
    ),
    "exporters.families.gated_decoder.read_architecture": (
        "exporters/families/gated_decoder/test_refusals.py",
        "exporters.families.gated_decoder.family",
    ),
    "exporters.families.gpt2.architecture": (
        "exporters/families/gpt2/test_family.py",
        "exporters.families.gpt2.family",
    ),
    "exporters.families.gpt2.load": ("exporters/families/gpt2/test_family.py", "exporters.families.gpt2.family"),
    "exporters.families.matformer.architecture.forward_ops": (
        "exporters/families/matformer/test_language_family.py",
        "exporters.families.matformer.language_family",
    ),
    "exporters.families.matformer.architecture.vision_ops": (
        "exporters/families/matformer/test_vision_family.py",
        "exporters.families.matformer.vision_family",
    ),
    "exporters.families.matformer.model.answering": (
        "exporters/families/matformer/architecture/test_presets.py",
        "exporters.families.matformer.language_family",
    ),
    "exporters.families.matformer.model.per_layer": (
        "exporters/families/matformer/model/test_language_model.py",
        "exporters.families.matformer.model.language_model",
    ),
    "exporters.families.mhe.read": (
        "exporters/families/mhe/test_encoder_family.py",
        "exporters.families.mhe.encoder_family",
    ),
    "exporters.families.mhe.model.encoder": (
        "exporters/families/mhe/test_encoder_family.py",
        "exporters.families.mhe.folder",
    ),
    "exporters.families.mhe.model.decoder": (
        "exporters/families/mhe/test_decoder_family.py",
        "exporters.families.mhe.folder",
    ),
    "exporters.families.sparse_mixer.routes": (
        "exporters/families/sparse_mixer/test_family.py",
        "exporters.families.sparse_mixer.family",
    ),
    "exporters.families.t5.architecture": ("exporters/families/t5/test_family.py", "exporters.families.t5.family"),
    "exporters.families.t5.forward_ops": ("exporters/families/t5/test_family.py", "exporters.families.t5.family"),
    "exporters.families.vit.architecture": ("exporters/families/vit/test_family.py", "exporters.families.vit.family"),
    "exporters.families.vit.load": ("exporters/families/vit/test_family.py", "exporters.families.vit.family"),
    "exporters.hugging_face.sentence_interface": (
        "exporters/sentence_transformers/test_refusals.py",
        "exporters.families.bert.family",
    ),
    "exporters.sentence_transformers.read_modules": (
        "exporters/sentence_transformers/test_refusals.py",
        "exporters.families.bert.family",
    ),
    "compiler.build.emitted": ("compiler/build/test_build_engine.py", "compiler.build.build_engine"),
    "compiler.build.fp32_reference": ("compiler/build/test_quality.py", "compiler.build.quality"),
    "compiler.build.prove_exact": ("compiler/build/test_build_engine.py", "compiler.build.build_engine"),
    "compiler.graph.passes.elementwise": (
        "compiler/graph/passes/test_free_elastic_dims.py",
        "compiler.graph.passes.dims_by_operator",
    ),
    "compiler.parity.prove": ("compiler/parity/test_prove_exits.py", "compiler.compile"),
    "compiler.parity.verify_segments": ("compiler/parity/evidence/test_reference.py", "compiler.verify"),
    "compiler.publish.report": ("compiler/publish/test_write_bundle.py", "compiler.publish.write_bundle"),
    "compiler.tensorrt.timing_cache": ("compiler/tensorrt/test_build_bundle.py", "compiler.tensorrt.build_plan"),
}


def mirror(module: str) -> Path:
    """Where the test of ``module`` lies if it has one of its own."""
    *rooms, name = module.split(".")
    return TESTS.joinpath(*rooms, f"test_{name}.py")


@cache
def imported(path: Path) -> frozenset[str]:
    """Modules of these layers that a file imports, also inside functions."""
    package = list(path.relative_to(ROOT).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("nestforge.") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])]).removeprefix("nestforge").removeprefix(".")
            found |= {base, *(f"{base}.{alias.name}".removeprefix(".") for alias in node.names)}
    return frozenset(found & MODULES.keys())


def mentioned(path: Path) -> set[str]:
    """What a test imports, and the homes of the public names that it takes from ``nestforge``, such as ``load``."""
    found = set(imported(path))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nestforge":
            found |= {_HOMES[node.attr][0]} if node.attr in _HOMES else set()
    if "exporters.source" in found:  # which finds the family of a folder by name
        found |= FAMILIES
    return found


def test_every_module_has_a_test_or_a_line() -> None:
    own = {module for module in MODULES if not module.endswith("__init__")}
    without = {module for module in own if not mirror(module).exists()}
    stated = TESTED_ELSEWHERE.keys() | TESTED_THROUGH.keys()
    assert without - stated == set(), "write a test, or say here which one tests it"
    assert stated - without == set(), "gone, or has a test of its own"
    assert TESTED_ELSEWHERE.keys() & TESTED_THROUGH.keys() == set()


@pytest.mark.parametrize("module", TESTED_ELSEWHERE)
def test_the_test_of_a_module_mentions_it(module: str) -> None:
    assert module in mentioned(TESTS / TESTED_ELSEWHERE[module])


@pytest.mark.parametrize("module", TESTED_THROUGH)
def test_the_test_of_a_part_mentions_what_the_part_belongs_to(module: str) -> None:
    test, through = TESTED_THROUGH[module]
    assert through in mentioned(TESTS / test)
    assert module in imported(MODULES[through])
