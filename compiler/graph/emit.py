"""Trace once, slice many: the emission of any submodel from a template, in milliseconds; what engines and their files
are called."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import onnx

from ...bucket import Bucket
from ...bundle.entries.engine_entry import EngineEntry
from ...elastic import Submodel
from .encodings import stored_stack
from .passes.free_elastic_dims import HeadAxes
from .store import Store, StoredTensor
from .template import Template, require_held

_MAX_STEM_LENGTH = 120


def emit(template: Template, store: Store, submodel: Submodel, inputs: Collection[str] = ()) -> bytes:
    """The ONNX file of ``submodel``: the template with its initializers bound to views of the weight store.

    Those called ``inputs`` become inputs, behind the others, in the shapes of their views. A table that the store does
    not have, of a submodel that was traced by itself, is held in the file. Raises ExportError for more than that holds.
    """
    tables = {name: table.nbytes for name, table in template.tables.items() if name not in store}
    require_held({**tables, "constants": template.private_bytes}, "ask for shorter `buckets`")
    model = onnx.ModelProto()
    model.CopyFrom(template.proto)
    bound = [name for name in template.external if name in inputs]
    _weights_to_inputs(model, {name: _stored(store, name).view_shape(submodel) for name in bound})
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        if tensor.name in template.tables and tensor.name not in store:
            tensor.CopyFrom(onnx.numpy_helper.from_array(template.tables[tensor.name], tensor.name))
            continue
        stored = _stored(store, tensor.name)
        tensor.dims[:] = stored.view_shape(submodel)
        place = {"location": stored.file, "offset": str(stored.offset), "length": str(stored.length(submodel))}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=value)
    _set_numbers(model, template, submodel)
    raw: bytes = model.SerializeToString(deterministic=True)
    return raw


def weight_bytes(template: Template, store: Store, submodel: Submodel) -> int:
    """Bytes of the weight store that the engine of ``submodel`` reads."""
    return sum(
        _stored(store, name).length(submodel)
        for name in template.external
        if name in store or name not in template.tables
    )


def private_bytes(template: Template, store: Store) -> int:
    """Bytes that the engine's own file holds, which no other engine shares."""
    return template.private_bytes + sum(table.nbytes for name, table in template.tables.items() if name not in store)


@dataclass(frozen=True)
class Emitted:
    """An engine whose file is written and whose parity is not proven yet: its ``graph``, and the ``proof_graph`` that
    this host runs to prove it."""

    entry: EngineEntry
    template: Template
    graph: bytes
    proof_graph: bytes

    @cached_property
    def graph_sha256(self) -> str:
        return hashlib.sha256(self.graph).hexdigest()


def engine_names(submodel: Submodel, parts: tuple[str, ...], bucket: Bucket) -> tuple[str, str]:
    """Id of the engine of ``submodel`` at ``bucket``, and what its files are called but for their ends; ``parts`` tell
    it from others of that submodel and bucket."""
    return (
        f"{'.'.join((submodel.id, *parts))}@{bucket.label}",
        f"{'.'.join((short(submodel.id), *parts))}.{bucket.label}",
    )


def short(submodel_id: str) -> str:
    """The id as part of a file name: ids with many different widths would not fit one."""
    if len(submodel_id) <= _MAX_STEM_LENGTH:
        return submodel_id
    return f"{submodel_id[:_MAX_STEM_LENGTH]}-{hashlib.sha256(submodel_id.encode()).hexdigest()[:8]}"


def _stored(store: Store, name: str) -> StoredTensor:
    """The tensor ``name`` of the store, or the row of one that it stands for."""
    stack, row = stored_stack(name)
    return store[stack] if row is None else store[stack].row(row)


def _set_numbers(model: onnx.ModelProto, template: Template, submodel: Submodel) -> None:
    """Sets what of ``submodel`` does not follow from the extents of its weights: dimensions of the graph's own inputs
    and outputs, and attributes, which are the heads of attention over a cache and the outputs of ``MatMulNBits``."""
    for tensor in (*model.graph.input, *model.graph.output):
        for dim, axis in template.dims.get(tensor.name, {}).items():
            tensor.type.tensor_type.shape.dim[dim].dim_value = submodel[axis]
    extents = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    for node in model.graph.node:
        queries, keys, group = template.heads.get(node.output[0], HeadAxes(None, None))
        axes = {"num_heads": (queries, group), "kv_num_heads": (keys, 1)}
        for attribute in node.attribute:
            shrinking, heads = axes.get(attribute.name, (None, 1))
            if shrinking is not None:
                attribute.i = heads * submodel[shrinking]
            elif node.op_type == "MatMulNBits" and attribute.name == "N":
                attribute.i = extents[node.input[1]][0]


def _weights_to_inputs(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Makes float32 inputs of the initializers in ``shapes``, behind the inputs that the model has, by name."""
    if not shapes:
        return
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in shapes]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    for name, shape in sorted(shapes.items()):
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
