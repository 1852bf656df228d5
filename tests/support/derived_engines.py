"""A small model's template in float32 and in other precisions, their weights in one store, and their answers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from nestforge.bucket import Bucket
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.compiler.graph.encodings import decoded, encode, split_encoding
from nestforge.compiler.graph.make_template import traced_template
from nestforge.compiler.graph.precision.calibrate import calibrate
from nestforge.compiler.graph.precision.fp32_nodes import fp32_products
from nestforge.compiler.graph.precision.half import half
from nestforge.compiler.graph.precision.quantize import dynamic, quantized, small_tables, static, weight_only
from nestforge.compiler.graph.store import Store, read_store, write_store
from nestforge.compiler.graph.template import Template, emit
from nestforge.elastic import Submodel
from nestforge.exporters.signature import Interface
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from nestforge.profiles.precision import INT4_G128, SCALES
from nestforge.runtime.inputs.arrays import random_feeds


@dataclass(frozen=True)
class WideTemplate:
    """The template of ``model``, or of a segment of it; ``heads`` are the outputs that stay float32."""

    model: UniversalModel
    template: Template
    interface: Interface
    heads: frozenset[str]


def wide_template(checkpoint: Path, bucket: Bucket, segment: int | None = None) -> WideTemplate:
    """The model in folder ``checkpoint``, in the first of its variants."""
    model = load_universal(open_source(checkpoint))
    source, heads = model.source, frozenset[str]()
    module, interface = model.module, source.signature
    if segment is not None:
        module, interface = source.exits.segment(module, segment), source.exits.entry.segments[segment]
        heads = frozenset({source.exits.entry.logits, source.exits.entry.entropy})
    offered = source.variants(model.spec.universal(), bucket)
    if source.architecture.lower is not None:
        first = {computed: next(iter(variants)) for computed, variants in offered.items()}
        module = source.architecture.lower(module, first)
    return WideTemplate(model, traced_template(model, module, interface, bucket, 20), interface, heads)


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
        return run_alone(path, self.feeds)


def half_engines(folder: Path, checkpoint: Path, bucket: Bucket, segment: int | None = None) -> HalfEngines:
    """The engines of the model in folder ``checkpoint``, or of a segment of it, whose heads stay float32."""
    made = wide_template(checkpoint, bucket, segment)
    model, wide, heads = made.model, made.template, made.heads
    templates = {"fp32": wide, "fp16": derived(wide, "fp16", heads), "bf16": derived(wide, "bf16", heads)}
    weights = {name for template in templates.values() for name in template.weights}
    tables = {name: table for template in templates.values() for name, table in template.tables.items()}
    write_store(model, weights, tables, folder)
    store = read_store([folder / WEIGHTS_NAME], model.spec)
    return HalfEngines(model, templates, store, folder, random_feeds(made.interface.inputs, bucket))


def derived(template: Template, precision: Any, heads: Collection[str] = ()) -> Template:
    """``template`` in another precision."""
    proto, tables = half(template.proto, template.tables, precision, heads)
    return replace(template, proto=proto, tables=tables)


FORMS = ("qdq", "int8", "int8-dynamic", "int4", "int4-g128")


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
    (path,) = write_store(model, wide.weights, wide.tables, folder)
    in_fp32 = fp32_products(wide.proto, heads)
    graph = onnx.ModelProto.FromString(emit(wide, read_store([path], model.spec), model.spec.universal()))
    feeds = random_feeds(made.interface.inputs, bucket)
    if "attention_mask" in feeds:  # a pooler reads the first token, so one that is hidden has no answer to compare
        feeds["attention_mask"][:, 0] = 1
    scales = calibrate(
        graph, folder, [random_feeds(made.interface.inputs, bucket, seed) for seed in range(1, 5)], in_fp32
    )
    protos = {
        "fp32": wide.proto,
        "qdq": quantized(wide.proto, scales, in_fp32),
        "int8": small_tables(static(wide.proto, scales, in_fp32)),
        "int8-dynamic": small_tables(dynamic(wide.proto, in_fp32)),
        "int4": small_tables(weight_only(wide.proto, in_fp32)),
        "int4-g128": small_tables(weight_only(wide.proto, in_fp32, encoding=INT4_G128)),
    }
    templates = {form: replace(wide, proto=proto) for form, proto in protos.items()}
    write_store(model, {name for template in templates.values() for name in template.weights}, wide.tables, folder)
    return EncodedEngines(model, templates, scales, read_store([path], model.spec), folder, feeds)


def run(
    graph: onnx.ModelProto, feeds: Mapping[str, np.ndarray], folder: Path, packed: bool = True
) -> dict[str, np.ndarray]:
    """Outputs by name of a graph beside its store."""
    path = folder / "engine.onnx"
    path.write_bytes(graph.SerializeToString())
    return run_alone(path, feeds, packed)


def run_alone(graph: Path | bytes, feeds: Mapping[str, np.ndarray], packed: bool = True) -> dict[str, np.ndarray]:
    """Outputs by name, by the kernels that the runtime would use."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    if not packed:
        options.add_session_config_entry("session.disable_prepacking", "1")
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"], enable_fallback=0)
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


def rounded(array: np.ndarray, name: str) -> np.ndarray:
    """The numbers that the encoded tensor ``name`` of the float32 ``array`` stands for."""
    plain, encoding = split_encoding(name)
    scales = [encode(array, plain + one) for one in SCALES.get(encoding, ())]
    return decoded(encode(array, name), name, *scales)[..., : array.shape[-1]]
