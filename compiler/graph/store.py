"""The weight store: a plain ``weights.safetensors``, or several, that every engine names as its external data.

Each tensor is stored once, with its elastic dimension first, so that a submodel's weights are byte prefixes. Weights
that some engines read as one, ``a+b``, lie in one tensor, and who reads ``a`` alone reads its rows there. Beside the
weights lie the tables of the graphs: constants that no engine should hold for itself, or compute. A tensor that engines
of several precisions read stands there once in each (encodings.py). A store of more than ``MOST_BYTES`` lies in
several files, each of whole tensors and written by itself, so that a compile that goes on rewrites none that is whole.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ...bundle.files import weight_names
from ...elastic import ElasticSpec, PrefixSlice, Submodel
from ...errors import CheckpointError
from ...exporters.universal import UniversalModel
from ...profiles.precision import BLOCK_INPUTS, FOUR_BITS, FP32, INT8, SCALES, WEIGHT_BITS, Encoding, encoded_shape
from ...progress import part_of
from ..work.tensor_file import (
    METADATA,
    Unmade,
    has_tensors,
    in_order,
    map_file,
    release_pages,
    write_tensors,
)
from .encodings import DTYPES, PER_OUTPUT, encode, parts_of, split_encoding
from .passes.contract import TRANSPOSED

# Of tensors in one file, but for a larger tensor, which has a file of its own. With its header that is less than the
# 4 GiB that some file systems and tools take.
MOST_BYTES = 4 * 10**9
# In a file's metadata: rows of each parameter that lies in a joined tensor, as JSON. It is there alone.
_ROWS = "rows"
# Weights that are encoded at once, so that what choosing scales takes, several times their bytes, stays in caches.
_BLOCK = 2**18
_NOTHING: Mapping[str, np.ndarray] = MappingProxyType({})


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the store: ``offset`` in its ``file``, full ``shape``, the slice of dimension 0 if it has one."""

    offset: int
    shape: tuple[int, ...]
    itemsize: int
    cut: PrefixSlice | None
    file: str

    def view_shape(self, submodel: Submodel) -> tuple[int, ...]:
        """Shape of the view in ``submodel``."""
        return self.shape if self.cut is None else (submodel[self.cut.axis] * self.cut.unit, *self.shape[1:])

    def length(self, submodel: Submodel) -> int:
        """Bytes of the view, from ``offset``."""
        return prod(self.view_shape(submodel)) * self.itemsize

    def rows(self, first: int, count: int) -> StoredTensor:
        """``count`` rows from ``first`` on, as a tensor of their own."""
        offset = self.offset + first * prod(self.shape[1:]) * self.itemsize
        return StoredTensor(offset, (count, *self.shape[1:]), self.itemsize, None, self.file)

    def row(self, number: int) -> StoredTensor:
        """Row ``number`` of dimension 0, as a tensor of its own; not of a transposed one."""
        shape = self.shape[1:]
        offset = self.offset + number * prod(shape) * self.itemsize
        return StoredTensor(offset, shape, self.itemsize, None, self.file)


Store = Mapping[str, StoredTensor]


@cache
def transposed_parameters(spec: ElasticSpec) -> frozenset[str]:
    """Parameters stored as their transpose: those whose only slice is along dimension 1."""
    cuts = spec.stored_slices
    return frozenset(cut.parameter for cut in cuts if cut.dim == 1 and len(spec.slices_of(cut.parameter)) == 1)


def unshared_parameters(spec: ElasticSpec) -> set[str]:
    """Parameters with no prefix layout (sliced in two dimensions): no view exists for them."""
    return {cut.parameter for cut in spec.stored_slices if len(spec.slices_of(cut.parameter)) > 1}


def stored_name(parameter: str, spec: ElasticSpec) -> str:
    """The name of a parameter in the store: transposed tensors carry the suffix ``.T``."""
    return parameter + (TRANSPOSED if parameter in transposed_parameters(spec) else "")


def joinable_parameters(model: UniversalModel) -> frozenset[str]:
    """Weights that may lie side by side in the store: nothing that an axis cuts or puts in order, which is requested by
    name, nor anything of a model whose engines take tasks, which are merged into weights by name."""
    spec = model.spec
    if model.source.tasks is not None:
        return frozenset()
    ordered = {cut.parameter for cut in (*spec.stored_slices, *spec.order_followers)}
    return frozenset(model.stored_shapes().keys() - ordered)


def write_store(
    model: UniversalModel,
    names: Collection[str],
    tables: Mapping[str, np.ndarray],
    folder: Path,
    chosen: Mapping[str, np.ndarray] = _NOTHING,
    once: Callable[[Path, Callable[[Path], None]], object] = lambda path, write: write(path),
) -> tuple[Path, ...]:
    """Writes the tensors ``names`` of the universal model (a parameter, that with ``.T``, or several joined, encoded or
    not), and ``tables``, one after the other; those of 4 bits as they are ``chosen`` already, if they are. A part of a
    joined one is not written again. Returns the files in ``folder``, each made ``once``; one that an earlier run left
    and that ends too early, or has other tensors, is made again. Raises OSError."""
    stored, shapes, known = model.stored(), model.stored_shapes(), dict(chosen)
    joined = [parts for name in names if len(parts := parts_of(name)) > 1]
    within = {part for parts in joined for part in parts}
    tensors = {name: _unmade(stored, shapes, name, known) for name in set(names) - within}
    rows = {plain: shapes[plain][0] for plain in sorted({split_encoding(part)[0] for part in within})}
    metadata = {_ROWS: json.dumps(rows)} if rows else METADATA
    shards, before = list(_shards({**tensors, **tables})), 0
    paths = tuple(folder / name for name in weight_names(len(shards)))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    for path, shard in zip(paths, shards, strict=True):
        if path.exists() and not has_tensors(shard, path, metadata):
            path.unlink()
        with part_of(total, before):
            once(path, partial(write_tensors, shard, metadata=metadata))
        before += sum(tensor.nbytes for tensor in shard.values())
    return paths


def _shards(tensors: Mapping[str, np.ndarray | Unmade]) -> Iterator[dict[str, np.ndarray | Unmade]]:
    """Tensors of each file, in the order of one file, as many as it may have."""
    shard, size = dict[str, np.ndarray | Unmade](), 0
    for name in in_order(tensors):
        if shard and size + tensors[name].nbytes > MOST_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensors[name]
        size += tensors[name].nbytes
    yield shard


def _unmade(
    stored: Callable[[str], torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    name: str,
    known: dict[str, np.ndarray],
) -> Unmade:
    parts, (_, encoding) = [split_encoding(part)[0] for part in parts_of(name)], split_encoding(name)
    turned = parts[0].endswith(TRANSPOSED)
    first, *others = [encoded_shape(shapes[part.removesuffix(TRANSPOSED)], encoding) for part in parts]
    shape = (first[0] + sum(other[0] for other in others), *first[1:]) if others else first
    if turned and encoding not in PER_OUTPUT:
        shape = shape[::-1]
    return Unmade(DTYPES[encoding], shape, partial(encoded_rows, stored, name, known))


def laid_out(stored: Callable[[str], torch.Tensor], name: str) -> np.ndarray:
    """The tensor ``name`` of the store, made from what is ``stored`` under its plain name."""
    first, *others = encoded_rows(stored, name, {})
    return np.concatenate([first, *others]) if others else first


def encoded_rows(
    stored: Callable[[str], torch.Tensor], name: str, known: dict[str, np.ndarray]
) -> Iterator[np.ndarray]:
    """The tensor ``name`` of the store, made from what is ``stored``, its ``rows_of`` at a time.

    ``known`` are tensors of 4 bits; scales are added to them when they are found, before the integers in a store's
    order, since the search for them takes longer than all else.
    """
    for part in parts_of(name):
        plain, encoding = split_encoding(part)
        (scales,), is_blocked = SCALES.get(encoding, (encoding,)), encoding in BLOCK_INPUTS
        scale, integers = (known.get(one) if is_blocked else None for one in (plain + scales, part))
        found = []
        for rows, data in rows_of(stored, part):
            own = None if scale is None else scale[rows]
            made = encode(data, part, own) if integers is None or own is None else integers[rows]
            found += [made] if is_blocked and encoding == scales and own is None else []
            yield made
        if found:
            known[part] = np.concatenate(found)


def rows_of(stored: Callable[[str], torch.Tensor], name: str) -> Iterator[tuple[Any, np.ndarray]]:
    """The float32 numbers that the tensor ``name`` of the store, no joined one, is made of, as it lays them out: some
    rows at a time with their slice, or all of them where a scale spans them."""
    plain, encoding = split_encoding(name)
    data, turned = stored(plain.removesuffix(TRANSPOSED)).numpy(), plain.endswith(TRANSPOSED)
    if data.ndim < 2 or (turned and encoding in (INT8, *PER_OUTPUT)):
        yield ..., np.ascontiguousarray(data.T) if data.ndim else data
        return
    data = data.T if turned else data
    step = max(_BLOCK // max(prod(data.shape[1:]), 1), 1)
    for rows in (slice(first, first + step) for first in range(0, len(data), step)):
        yield rows, np.ascontiguousarray(data[rows])


def read_store(files: Iterable[Path], spec: ElasticSpec) -> Store:
    """The index of a weight store of these ``files``: its tensors, and the parts of joined ones."""
    return dict(chain.from_iterable(_stored(path, spec) for path in files))


def _stored(path: Path, spec: ElasticSpec) -> Iterable[tuple[str, StoredTensor]]:
    with path.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(header_bytes))
    base = 8 + header_bytes
    rows: Mapping[str, int] = json.loads(header.get("__metadata__", {}).get(_ROWS, "{}"))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        size = (end - begin) // max(prod(shape), 1)
        tensor = StoredTensor(base + begin, shape, size, _cut(name, spec), path.name)
        yield name, tensor
        parts, first = parts_of(name), 0
        for part in parts if len(parts) > 1 else ():
            count = rows[split_encoding(part)[0]]
            yield part, tensor.rows(first, count)
            first += count


def _cut(name: str, spec: ElasticSpec) -> PrefixSlice | None:
    """The slice of dimension 0 of a stored tensor."""
    plain, encoding = split_encoding(name)
    if encoding in PER_OUTPUT and plain.endswith(TRANSPOSED):
        return None  # a scale for every output, and the inputs shrink
    cuts = spec.slices_of(plain.removesuffix(TRANSPOSED))
    return cuts[0] if cuts else None


def recover_order(files: Sequence[Path], model: UniversalModel) -> dict[str, torch.Tensor]:
    """The permutation of every order that turns ``model``'s weights into the store's, found by their bytes.

    A tensor that no engine reads is not in the store: what was made of it says the order then. Raises CheckpointError
    if a step of the store is not a step of the model: it was made from other weights.
    """
    of_model, orders, unshared = model.stored(), {}, unshared_parameters(model.spec)
    folded = [cut for cut in model.spec.folded.values() if cut is not None]
    held = stored_arrays(files, model.spec)
    for order in model.spec.orders:
        cuts = [cut for cut in (*order.slices, *order.followers) if cut.parameter not in unshared]
        made = [cut for cut in folded if cut.axis == order.axis.name]
        found = [(_name_in(held, cut.parameter, model.spec), cut) for cut in (*cuts, *made)]
        stored = [(name, cut) for name, cut in found if name is not None]
        if not stored or (len(stored) < len(cuts) and not made):
            raise _other_model(model, f"weights of {order.name} have other names in {files[0].parent}")
        # Integers of 4 bits may be chosen on examples, and are then no function of a step's weights alone.
        stored = [pair for pair in stored if split_encoding(pair[0])[1] not in FOUR_BITS] or stored
        ours = _step_keys((laid_out(of_model, name), name, cut) for name, cut in stored)
        theirs = _step_keys((held[name], name, cut) for name, cut in stored)
        places: dict[bytes, list[int]] = {}
        for place, key in enumerate(ours):
            places.setdefault(key, []).append(place)
        try:
            orders[order.name] = torch.tensor([places[key].pop(0) for key in theirs])
        except (KeyError, IndexError):
            raise _other_model(model, f"weights of {order.name} are not those in {files[0].parent}") from None
    return orders


def _other_model(model: UniversalModel, problem: str) -> CheckpointError:
    return CheckpointError(f"{model.source.checkpoint.folder}: {problem}; the bundle was made from another model")


def _name_in(names: Collection[str], parameter: str, spec: ElasticSpec) -> str | None:
    """The stored tensor that holds the weights of ``parameter``, if there is one."""
    stored = stored_name(parameter, spec)
    return next((stored + held for held in WEIGHT_BITS if stored + held in names), None)


def _step_keys(tensors: Iterable[tuple[np.ndarray, str, PrefixSlice]]) -> list[bytes]:
    """One hash per step, over its blocks in every tensor, given as the store lays it out, with its name there."""
    digests: list[Any] = []
    for array, name, cut in tensors:
        steps = _steps(array.T if split_encoding(name)[0].endswith(TRANSPOSED) else array, cut)
        digests = digests or [hashlib.sha256() for _ in steps]
        for digest, step in zip(digests, steps, strict=True):
            digest.update(step.tobytes())
    return [digest.digest() for digest in digests]


def _steps(array: np.ndarray, cut: PrefixSlice) -> np.ndarray:
    """The steps of an axis in front: ``[n, unit, ...]``."""
    steps = np.moveaxis(array, cut.dim, 0)
    return steps.reshape(-1, cut.unit, *steps.shape[1:])


def share_store(model: UniversalModel, files: Iterable[Path]) -> None:
    """Makes the parameters of ``model`` views of a store that was written from it, and frees what they were.

    One that has other numbers there stays, for the gate to find; and so does one that has other forms there alone.
    """
    views = float32_views(files, model.spec)
    for name, parameter in model.parameters().items():
        view = views.get(name)
        # A view of the checkpoint's file would keep all of it in memory.
        parameter.data = view if view is not None and _are_same(view, parameter.data) else parameter.data.clone()
        release_pages()
    for buffer in model.module.buffers():
        buffer.data = buffer.data.clone()


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two float32 tensors are equal to the bit; some rows of them at a time, since one may be transposed."""
    if one.shape != other.shape:
        return False
    one, other = (tensor.view(torch.int32) for tensor in (one, other))
    rows = max(1, _BLOCK * one.shape[0] // max(one.numel(), 1)) if one.ndim else 0
    return all(map(torch.equal, torch.split(one, rows), torch.split(other, rows))) if rows else torch.equal(one, other)


def float32_views(files: Iterable[Path], spec: ElasticSpec) -> dict[str, torch.Tensor]:
    """The float32 tensors of a store, by the names of what they are, as views of its files."""
    views = dict[str, torch.Tensor]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch cannot protect what nothing may write to
        for plain, array in stored_arrays(files, spec, FP32).items():
            view = torch.from_numpy(array.T if plain.endswith(TRANSPOSED) else array)
            views[plain.removesuffix(TRANSPOSED)] = view
    return views


def stored_arrays(files: Iterable[Path], spec: ElasticSpec, *encodings: Encoding) -> dict[str, np.ndarray]:
    """The tensors of a store in ``encodings``, or all, by their names, as views of its files; no tables of integers."""
    arrays = dict[str, np.ndarray]()
    for path in files:
        index, pages = _stored(path, spec), map_file(path)
        for name, tensor in index:
            encoding = split_encoding(name)[1]
            dtype = DTYPES[encoding]
            if encoding in (encodings or DTYPES) and tensor.itemsize == dtype.itemsize:
                arrays[name] = np.frombuffer(pages, dtype, prod(tensor.shape), tensor.offset).reshape(tensor.shape)
    return arrays
