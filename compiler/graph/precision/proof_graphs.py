"""Proof graphs: what this host runs in ONNX Runtime to prove engines, whatever backend they are for.

An engine for TensorRT is a graph until its plan is built, and is proven by that graph; one in bfloat16, which no
processor computes with, by a float32 emulation. Proof graphs have the names of their engines' files and lie in a folder
of their own, beside a link to the weight store; a bundle never holds them. Quantised engines are proven a second time,
without the rounding of their activations.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from onnx import TensorProto

from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.manifest import Manifest
from ....bundle.open_bundle import Bundle
from ....profiles.backends import BACKENDS, ONNXRUNTIME
from ....profiles.precision import BLOCK_INPUTS, PRECISIONS, Precision
from ...work.staging import link
from ..edit import Edit
from ..passes.operators import MICROSOFT
from .fp32_nodes import MOVEMENT, element_types

_SIXTEEN_BIT_TYPES = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})
# Bits and inputs of a block of what MatMulNBits reads, without zero points.
_FOUR_BITS = [(4, size) for size in sorted({*BLOCK_INPUTS.values()})]
_QUANTISE = frozenset({"QuantizeLinear", "DequantizeLinear"})
# Divisor of a row of zeros here, where nothing is rounded to integers behind it.
_LEAST_UNIT = np.array(1e-30, np.float32)


def proof_graph(graph: bytes, precision: Precision) -> bytes:
    """Graph that proves the emitted engine ``graph``: itself, or of bfloat16 its emulation."""
    return emulated(graph) if PRECISIONS[precision].is_emulated else graph


def emulated(graph: bytes) -> bytes:
    """The emitted engine ``graph`` as float32, rounding where it holds 16 bits; reads the same bytes of the store.

    Weights are widened, which is exact, and what a node computes is rounded to 16 bits and widened again. Products are
    summed in float32, as GPUs do it. The same holds of an engine in float16: there ONNX Runtime drops roundings between
    nodes that it widens itself, so its own run says less about a GPU's.
    """
    model = onnx.ModelProto.FromString(graph)
    narrow = {name: kind for name, kind in element_types(model).items() if kind in _SIXTEEN_BIT_TYPES}
    edit, widened = Edit(model), dict[str, str]()
    for name in list(edit.initializers):
        if name in narrow:
            widened[name] = edit.add("Cast", [name], to=TensorProto.FLOAT)
    for node in edit.source:
        node.input[:] = [widened.get(name, name) for name in node.input]
        edit.nodes.append(node)
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i in _SIXTEEN_BIT_TYPES:
                attribute.i = TensorProto.FLOAT
        if node.op_type in MOVEMENT - {"Cast"}:
            continue  # of what is rounded already
        for place, name in enumerate(node.output):
            if name in narrow:
                node.output[place] = f"{name}.exact"
                rounded = edit.add("Cast", [node.output[place]], to=narrow[name])
                edit.add("Cast", [rounded], [name], to=TensorProto.FLOAT)
    return edit.done().SerializeToString(deterministic=True)


def exact(graph: bytes) -> bytes:
    """The emitted quantised engine ``graph`` with its products in float32, over the same bytes of the store.

    Rounding activations moves an answer by more than most faults would, so that no comparison of the engine itself can
    tell a dropped bias from it. This graph has every other node of the engine; given the numbers that its integers
    stand for, a PyTorch module computes the same to the last bits.
    """
    edit = Edit(onnx.ModelProto.FromString(graph))
    producers = {name: node for node in edit.source for name in node.output}

    def before(name: str) -> str:
        """The value that ``name`` was rounded from."""
        node = producers.get(name)
        while node is not None and node.op_type in _QUANTISE and node.input[0] in producers:
            name, node = node.input[0], producers.get(node.input[0])
        return node.input[0] if node is not None and node.op_type == "QuantizeLinear" else name

    for node in edit.source:
        if node.op_type == "QGemm":
            (trans_b,) = (attribute.i for attribute in node.attribute if attribute.name == "transB")
            weight = edit.add("DequantizeLinear", [*node.input[3:6]], axis=0 if trans_b else 1)
            edit.add("Gemm", [before(node.input[0]), weight], node.output, transB=trans_b)
            continue
        if node.op_type == "MatMulIntegerToFloat":
            weight = edit.add("DequantizeLinear", [node.input[1], node.input[3], node.input[5]], axis=1)
            edit.add("MatMul", [before(node.input[0]), weight], node.output)
            continue
        if node.op_type == "ReduceMax" and (size := producers.get(node.input[0])) and size.op_type == "Abs":
            largest = edit.add("ReduceMax", node.input)
            edit.add("Max", [largest, edit.constant(_LEAST_UNIT)], node.output)
            continue
        if node.op_type == "MatMulNBits":  # which sums many tokens in one chain in float32, where Gemm sums in blocks
            said = {attribute.name: attribute.i for attribute in node.attribute}
            form, width = (said.get("bits", 4), said["block_size"], *filter(None, node.input[3:5])), said["K"]
            assert form in _FOUR_BITS, f"MatMulNBits {node.output[0]}: expected some of {_FOUR_BITS}, got {form}"
            shape = edit.constant(np.array([0, -1], np.int64))
            numbers = edit.add("Reshape", [edit.decoded_int4(*node.input[1:3]), shape])
            if edit.initializers[node.input[1]].dims[1] * said["block_size"] != width:
                first, last = (edit.constant(np.array([at], np.int64)) for at in (0, width))
                numbers = edit.add("Slice", [numbers, first, last, edit.constant(np.array([1], np.int64))])
            bias = node.input[5:6]
            product = edit.add("FusedMatMul", [node.input[0], numbers], 1 if bias else node.output, MICROSOFT, transB=1)
            if bias:
                edit.add("Add", [product, *bias], node.output)
            continue
        if node.op_type == "Gemm":
            node.input[0] = before(node.input[0])
        edit.nodes.append(node)
    return edit.done().SerializeToString(deterministic=True)


def in_onnx_runtime(engine: EngineEntry) -> EngineEntry:
    """``engine`` as this host runs it."""
    return engine if BACKENDS[engine.backend].runs_graphs else replace(engine, backend=ONNXRUNTIME.name)


def with_proof_graphs(bundle: Bundle, folder: Path) -> Bundle:
    """``bundle`` as this host runs it, with the proof graphs in ``folder``, whose hashes are not those it lists."""
    manifest = replace(_here(bundle.manifest), files=bundle.manifest.weight_files)
    return Bundle(folder.absolute(), manifest, bundle.build)


def _here(manifest: Manifest) -> Manifest:
    """``manifest`` with its engines as this host runs them."""
    generation = manifest.generation
    if generation is not None:
        generation = generation.with_engines(map(in_onnx_runtime, generation.every_engine))
    return replace(manifest, engines=tuple(map(in_onnx_runtime, manifest.engines)), generation=generation)


def link_shared_files(bundle: Bundle, folder: Path) -> None:
    """Puts what engines of ``bundle`` read beside their graphs into ``folder``, which is made."""
    folder.mkdir(exist_ok=True)
    for file in (*bundle.manifest.weight_names, *((bundle.manifest.text.file,) if bundle.manifest.text else ())):
        link(bundle.file(file), folder / file)


def proof_bundle_in(bundle: Bundle, folder: Path) -> Bundle:
    """A written ``bundle`` as this host runs it: its own files, or proof graphs in ``folder`` where any differs."""
    engines = {engine.file: engine for engine in bundle.manifest.engines}
    emulates = {file for file, engine in engines.items() if not BACKENDS[engine.backend].runs_graphs}
    if not any(PRECISIONS[engines[file].precision].is_emulated for file in emulates):
        return replace(bundle, manifest=_here(bundle.manifest))
    link_shared_files(bundle, folder)
    for file, engine in engines.items():
        (folder / file).write_bytes(proof_graph(bundle.file(file).read_bytes(), engine.precision))
    return with_proof_graphs(bundle, folder)


@contextmanager
def proof_bundle(bundle: Bundle) -> Iterator[Bundle]:
    """``proof_bundle_in`` a temporary folder."""
    with TemporaryDirectory() as folder:
        yield proof_bundle_in(bundle, Path(folder))
