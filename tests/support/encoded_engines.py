"""A small model's template in float32 and in every 8 and 4 bit form, their weights in one store, and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from nestforge.bucket import Bucket
from nestforge.bundle.manifest import WEIGHTS_NAME
from nestforge.compiler.graph.emit import emit
from nestforge.compiler.graph.precision.calibrate import calibrate
from nestforge.compiler.graph.precision.fp32_nodes import kept_products
from nestforge.compiler.graph.precision.quantize import as_qgemm, dynamic, quantized, small_tables, weight_only
from nestforge.compiler.graph.store import Store, read_store, write_store
from nestforge.compiler.graph.template import Template
from nestforge.elastic import Submodel
from nestforge.exporters.universal import UniversalModel
from nestforge.runtime.inputs.arrays import random_feeds
from support.wide_template import wide_template

FORMS = ("qdq", "int8", "int8-dynamic", "int4")


@dataclass(frozen=True)
class EncodedEngines:
    """Templates by form: ``fp32``, and FORMS; ``folder`` holds the store, ``scales`` are those of calibration."""

    model: UniversalModel
    templates: Mapping[str, Template]
    scales: Mapping[str, float]
    store: Store
    folder: Path
    feeds: Mapping[str, np.ndarray]

    def graph(self, form: str, submodel: Submodel) -> onnx.ModelProto:
        return onnx.ModelProto.FromString(emit(self.templates[form], self.store, submodel))

    def answers(self, form: str, submodel: Submodel, packed: bool = True) -> dict[str, np.ndarray]:
        """Outputs by name of an engine, opened as the runtime opens it."""
        return run(self.graph(form, submodel), self.feeds, self.folder, packed)


def encoded_engines(folder: Path, checkpoint: Path, bucket: Bucket, segment: int | None = None) -> EncodedEngines:
    """The engines of the model in folder ``checkpoint``, or of a segment of it, whose heads stay float32."""
    made = wide_template(checkpoint, bucket, segment)
    model, wide, heads = made.model, made.template, made.heads
    path = folder / WEIGHTS_NAME
    write_store(model, wide.weights, wide.tables, path)
    kept = kept_products(wide.proto, heads)
    graph = onnx.ModelProto.FromString(emit(wide, read_store(path, model.spec), model.spec.universal()))
    feeds = random_feeds(made.interface.inputs, bucket)
    if "attention_mask" in feeds:  # a pooler reads the first token, so one that is hidden has no answer to compare
        feeds["attention_mask"][:, 0] = 1
    scales = calibrate(graph, folder, [random_feeds(made.interface.inputs, bucket, seed) for seed in range(1, 5)], kept)
    qdq = quantized(wide.proto, scales, kept)
    protos = {
        "fp32": wide.proto,
        "qdq": qdq,
        "int8": small_tables(as_qgemm(qdq)),
        "int8-dynamic": small_tables(dynamic(wide.proto, kept)),
        "int4": small_tables(weight_only(wide.proto, kept)),
    }
    templates = {form: replace(wide, proto=proto) for form, proto in protos.items()}
    write_store(model, {name for template in templates.values() for name in template.weights}, wide.tables, path)
    return EncodedEngines(model, templates, scales, read_store(path, model.spec), folder, feeds)


def run(
    graph: onnx.ModelProto, feeds: Mapping[str, np.ndarray], folder: Path, packed: bool = True
) -> dict[str, np.ndarray]:
    """Outputs by name, by the kernels that the runtime would use."""
    path = folder / "engine.onnx"
    path.write_bytes(graph.SerializeToString())
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    if not packed:
        options.add_session_config_entry("session.disable_prepacking", "1")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def filled(proto: onnx.ModelProto, tensors: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """A graph whose external initializers are held in it, with the values ``tensors``."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.CopyFrom(onnx.numpy_helper.from_array(tensors[tensor.name], tensor.name))
    return model


def parsed(text: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    """A graph in ONNX's text form, with ``weights`` that lie in the store, as shapes by name; ``__`` for a dot."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
    external = onnx.TensorProto.EXTERNAL
    for name, shape in weights.items():
        dotted = name.replace("__", ".")
        model.graph.initializer.append(
            onnx.TensorProto(name=dotted, dims=shape, data_type=onnx.TensorProto.FLOAT, data_location=external)
        )
        for node in model.graph.node:
            node.input[:] = [dotted if read == name else read for read in node.input]
    return model
