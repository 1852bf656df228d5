"""A template: the graph of which every submodel is a slice, as a value and as a file; and the emission of any submodel
from it, in milliseconds, with what engines and their files are called."""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path

import numpy as np
import onnx

from ...bucket import Bucket
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.task_entry import LORA_A, LORA_B
from ...elastic import Submodel
from ...errors import BuildError, ExportError
from ...profiles.precision import Encoding, Precision
from ..work.staging import write_synced
from .edit import Edit
from .encodings import parts_of, split_encoding, stored_stack
from .passes.contract import TRANSPOSED
from .passes.free_elastic_dims import HeadAxes
from .store import Store, StoredTensor

_METADATA_KEY = "nestforge.template"
# Bytes of constants in a graph: protobuf writes 2 GiB at most, and nodes and names need some of it.
_MOST_HELD = 2**31 - 2**26


@dataclass(frozen=True)
class Template:
    """The ONNX graph of a universal model, or of a segment of it, at one bucket; weights named but not held.

    ``slice_problem`` says why submodels cannot be emitted from it, or is None. ``module_outputs`` maps a module of the
    PyTorch model to the value it returns, for modules that survived the passes. ``tables`` are its large constants,
    each named by its content. ``precision`` is that of its products: a graph is traced in fp32, and others derived from
    it (precision/derive.py). ``heads`` are the axes of attention over a cache, by what it returns; ``dims`` those of
    inputs and outputs, as of ``Part.elastic``.
    """

    bucket: Bucket
    proto: onnx.ModelProto
    module_outputs: dict[str, str]
    slice_problem: str | None
    tables: Mapping[str, np.ndarray] = field(default_factory=dict)
    precision: Precision = "fp32"
    heads: Mapping[str, HeadAxes] = field(default_factory=dict)
    dims: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """Names of the weight store's tensors that are made of parameters, joined ones among them."""
        return tuple(dict.fromkeys(stored_stack(name)[0] for name in self.external if name not in self.tables))

    @cached_property
    def external(self) -> tuple[str, ...]:
        """Names of the initializers that are read from the weight store: parameters, rows of them, and tables."""
        tensors = self.proto.graph.initializer
        return tuple(tensor.name for tensor in tensors if tensor.data_location == onnx.TensorProto.EXTERNAL)

    @cached_property
    def encodings(self) -> Mapping[str, frozenset[Encoding]]:
        """Parameters to the encodings in which they are read, from the weight store or the engine's own file; beside
        them other constants, which are float32 or have the names of none."""
        found: dict[str, set[Encoding]] = {}
        for tensor in self.proto.graph.initializer:
            for part in parts_of(stored_stack(tensor.name)[0]):
                plain, encoding = split_encoding(part)
                found.setdefault(plain.removesuffix(TRANSPOSED), set()).add(encoding)
        return {name: frozenset(encodings) for name, encodings in found.items()}

    @cached_property
    def private_bytes(self) -> int:
        """Bytes of constants that every engine keeps for itself."""
        tensors = self.proto.graph.initializer
        return sum(len(t.raw_data) for t in tensors if t.data_location != onnx.TensorProto.EXTERNAL)


def require_held(sizes: Mapping[str, int], mend: str) -> None:
    """Refuses constants of ``sizes`` in bytes, by name, that no ONNX file holds. Raises ExportError, which says what to
    ``mend``."""
    total = sum(sizes.values())
    if total > _MOST_HELD:
        raise ExportError(
            f"{max(sizes, key=sizes.__getitem__)} and others, {total / 1e9:.1f} GB, would lie in every engine's file, "
            f"which holds 2 GB at most; {mend}"
        )


def save_template(template: Template, path: Path) -> None:
    """Writes a template as an ONNX file with its own facts as metadata, and beside it the tables that it names."""
    for name, table in template.tables.items():
        data = BytesIO()
        np.save(data, table)  # into a file numpy itself would write, whose error does not say that the disk is full
        write_synced(_table_file(path, name), data.getbuffer())
    proto = onnx.ModelProto()
    proto.CopyFrom(template.proto)
    facts = {
        "bucket": template.bucket.label,
        "modules": template.module_outputs,
        "problem": template.slice_problem,
        "tables": sorted(template.tables),
        "heads": template.heads,
        "dims": {name: sorted(dims.items()) for name, dims in template.dims.items()},
    }
    proto.metadata_props.add(key=_METADATA_KEY, value=json.dumps(facts, sort_keys=True))
    write_synced(path, proto.SerializeToString(deterministic=True))


def load_template(path: Path) -> Template:
    """Reads what ``save_template`` wrote."""
    proto = onnx.ModelProto.FromString(path.read_bytes())
    facts = json.loads(proto.metadata_props[0].value)
    del proto.metadata_props[:]
    tables = {name: np.load(_table_file(path, name), mmap_mode="r") for name in facts["tables"]}
    heads = {name: HeadAxes(*axes) for name, axes in facts["heads"].items()}
    dims = {name: dict(axes) for name, axes in facts["dims"].items()}
    bucket = Bucket.parse(facts["bucket"])
    return Template(bucket, proto, facts["modules"], facts["problem"], tables, heads=heads, dims=dims)


def _table_file(template: Path, table: str) -> Path:
    return template.parent / f"{table}.npy"


def without_pairs(template: Template) -> Template:
    """The template of engines that a task is merged into: ``x W`` in the place of every ``x W + (x A) B`` of a pair of
    low-rank matrices, as pairs of zeros would give; ``template`` itself where it has no pairs.

    Raises BuildError for a pair that is no summand, perhaps behind a Reshape.
    """
    pairs = [name for name in template.external if name.removesuffix(TRANSPOSED).endswith((LORA_A, LORA_B))]
    if not pairs:
        return template
    edit = Edit(template.proto)
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in edit.source:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    sums = [_sum_of(product, readers, name) for name in pairs if _is_second(name) for product in readers.get(name, ())]
    # The rest of a sum takes its name.
    renamed = {next(v for v in total.input if v != added): total.output[0] for total, added in sums}
    gone = {id(total) for total, _ in sums}
    edit.nodes = [node for node in edit.source if id(node) not in gone]
    for node in edit.nodes:
        for values in (node.input, node.output):
            values[:] = [renamed.get(value, value) for value in values]
    proto = edit.done()
    if found := {tensor.name for tensor in proto.graph.initializer}.intersection(pairs):
        raise BuildError(f"a pair of low-rank matrices, {min(found)}, is read beside its layer; nothing can be merged")
    made = {value for node in proto.graph.node for value in node.output}
    modules = {module: value for module, value in template.module_outputs.items() if value in made}
    return replace(template, proto=proto, module_outputs=modules)


def _is_second(pair: str) -> bool:
    return pair.removesuffix(TRANSPOSED).endswith(LORA_B)


def _sum_of(product: onnx.NodeProto, readers: dict[str, list[onnx.NodeProto]], pair: str) -> tuple[onnx.NodeProto, str]:
    """The sum that ``product`` is a summand of, and the summand's name."""
    value = product.output[0]
    while True:
        following = readers.get(value, [])
        if len(following) == 1 and following[0].op_type == "Reshape":
            value = following[0].output[0]
        elif len(following) == 1 and following[0].op_type == "Add":
            return following[0], value
        else:
            raise BuildError(f"the pair of low-rank matrices {pair} is no summand of its layer; nothing can be merged")


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
    return model.SerializeToString(deterministic=True)


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
