"""A small model's template in float32, fp16 and bf16, their weights in one store, and what engines of them answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from nestforge.bucket import Bucket
from nestforge.bundle.manifest import WEIGHTS_NAME
from nestforge.compiler.graph.emit import emit
from nestforge.compiler.graph.precision.half import half
from nestforge.compiler.graph.store import Store, read_store, write_store
from nestforge.compiler.graph.template import Template
from nestforge.elastic import Submodel
from nestforge.exporters.universal import UniversalModel
from nestforge.runtime.inputs.arrays import random_feeds
from onnx import TensorProto
from support.wide_template import wide_template


@dataclass(frozen=True)
class HalfEngines:
    """Templates by precision; ``folder`` holds the store."""

    model: UniversalModel
    templates: Mapping[str, Template]
    store: Store
    folder: Path
    feeds: Mapping[str, np.ndarray]

    def engine(self, precision: str, submodel: Submodel) -> bytes:
        return emit(self.templates[precision], self.store, submodel)

    def answers(self, graph: bytes) -> dict[str, np.ndarray]:
        """Outputs by name of an engine, opened as the runtime opens it."""
        path = self.folder / "engine.onnx"
        path.write_bytes(graph)
        onnx.checker.check_model(str(path.resolve()), full_check=True)
        return run(path, self.feeds)


def half_engines(folder: Path, checkpoint: Path, bucket: Bucket, segment: int | None = None) -> HalfEngines:
    """The engines of the model in folder ``checkpoint``, or of a segment of it, whose heads stay float32."""
    made = wide_template(checkpoint, bucket, segment)
    model, wide, heads = made.model, made.template, made.heads
    templates = {"fp32": wide, "fp16": derived(wide, "fp16", heads), "bf16": derived(wide, "bf16", heads)}
    weights = {name for template in templates.values() for name in template.weights}
    tables = {name: table for template in templates.values() for name, table in template.tables.items()}
    write_store(model, weights, tables, folder / WEIGHTS_NAME)
    store = read_store(folder / WEIGHTS_NAME, model.spec)
    return HalfEngines(model, templates, store, folder, random_feeds(made.interface.inputs, bucket))


def derived(template: Template, precision: Any, heads: Collection[str] = ()) -> Template:
    """``template`` in another precision."""
    converted = half(template.proto, template.tables, precision, heads)
    return replace(template, proto=converted.proto, tables=converted.tables)


def run(graph: Path | bytes, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs by name, by the kernels that the runtime would use."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def parsed(text: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    """A graph in ONNX's text form, with ``weights`` that lie in the store, as shapes by name."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
    model.graph.initializer.extend(
        TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
        for name, shape in weights.items()
    )
    return model
