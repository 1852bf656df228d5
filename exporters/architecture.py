"""One model as its family reads it, once, from configuration and tensor headers: what the compiler asks of it."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..bucket import Bucket
from ..bundle.entries.engine_entry import RoutingEntry
from ..bundle.entries.task_entry import TaskKind
from ..bundle.manifest import Proof
from ..elastic import ElasticSpec, Submodel
from ..errors import CheckpointError, ParityError
from ..runtime.inputs.arrays import Arrays
from ..workload import Op
from .parts import CachedSpec, Exits
from .sentence_transformers.read_modules import SentenceModules
from .signature import Signature

if TYPE_CHECKING:  # plans are made without torch
    import torch

# The last module, or the parameter itself, of a table: word_embeddings, embed_tokens, wte, lm_head...
_TABLE_NAME = re.compile(r"(?:.+\.)?(?:(?:\w+_)?embeddings?|embed_\w+|wte|wpe|lm_head)(?:\.weight)?")

_FFN_KIND = "ffn"


@dataclass(frozen=True)
class ParameterGroups:
    """Counts of one submodel. ``embedding`` and ``ffn`` share no parameter; attention, norms... are in neither."""

    total: int
    embedding: int
    ffn: int

    @property
    def non_embedding(self) -> int:
        return self.total - self.embedding


def is_table(parameter: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter looks like a table of tokens or positions, or like the matrix back to the vocabulary.

    The rule goes by name: ``embeddings``, ``embed_...``, ``wte``, ``wpe`` or ``lm_head``, with two dimensions or more.
    A tied matrix back to the vocabulary is no parameter of its own; an untied one counts as a table, so that the
    non-embedding size of a model does not depend on tying.
    """
    return len(shape) > 1 and _TABLE_NAME.fullmatch(parameter) is not None


def parameter_groups(
    spec: ElasticSpec,
    shapes: Mapping[str, tuple[int, ...]],
    submodel: Submodel,
    is_embedding: Callable[[str, tuple[int, ...]], bool] = is_table,
) -> ParameterGroups:
    """Counts of ``submodel``, given the ``shapes`` of the universal model's parameters by name.

    ``ffn`` are the parameters that an axis of kind ``ffn`` slices, weights and biases alike; a bias that no slice
    changes, such as that of the down-projection, is not among them. ``is_embedding(parameter, full_shape)`` says which
    of the others are tables.
    """
    total = embedding = ffn = 0
    feed_forward = {axis.name for axis in spec.axes if axis.kind == _FFN_KIND}
    for name, shape in shapes.items():
        if not spec.has(name, submodel):
            continue
        count = prod(spec.shape_of(name, shape, submodel))
        total += count
        if any(cut.axis in feed_forward for cut in spec.slices_of(name)):
            ffn += count
        elif is_embedding(name, shape):
            embedding += count
    return ParameterGroups(total, embedding, ffn)


@dataclass(frozen=True, eq=False)
class Folded:
    """``shapes`` of every such tensor of the universal model by name; ``ElasticSpec.folded`` says how they shrink.

    ``make(module, name)`` makes one of the parameters of ``module``, what ``Architecture.load`` returned, in the order
    that these have now. A slice of it must be, to the bit, what is made of the slices: ``lower`` gives its module the
    same tensors, made of a narrowed module, as parameters of these names.
    """

    shapes: Mapping[str, tuple[int, ...]]
    make: Callable[[torch.nn.Module, str], torch.Tensor]


@dataclass(frozen=True)
class JudgedRoutes:
    """The routes of one tensor that a pass was made to take, judged by the scores that the pass had where it took them.

    ``score_gap``: by how much the worst of its ``made`` single choices is worse than the pass's own, in units of the
    score; 0 where equal, infinite where no score explains it. ``where`` names that choice. ``differing`` of them are
    not the pass's own. ``shares`` are figures such as ``tokens_dropped``.
    """

    score_gap: float
    where: str
    made: int
    differing: int
    shares: Mapping[str, float]


@dataclass(frozen=True)
class Replay:
    """One pass of a model that was made to take given routes, each tensor of them judged, by name."""

    outputs: tuple[torch.Tensor, ...]
    routes: Mapping[str, JudgedRoutes]


# The routes of a layer are called by this and its number.
ROUTES = "routes."


class Routing(ABC):
    """The routes of one model. Its traced module (``Architecture.lower``) returns them after its outputs, in order."""

    @abstractmethod
    def entries(self, submodel: Submodel, bucket: Bucket) -> tuple[RoutingEntry, ...]:
        """Names and shapes of the routes (int64) that an engine returns."""

    @abstractmethod
    def metadata(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, int | str]:
        """Static numbers and rules of an engine that no shape of it shows, for the manifest."""

    @abstractmethod
    def orders(self, name: str) -> Mapping[int, str]:
        """The dimensions of the routes ``name`` that count steps which may be permuted, each with the name of its order
        (``ElasticSpec.orders``)."""

    @abstractmethod
    def replay(
        self, module: torch.nn.Module, inputs: Sequence[torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> Replay:
        """A pass of ``module`` (what ``Architecture.load`` returned, perhaps narrowed) with the routes ``given``, by
        name, in place of its own.

        Raises ParityError naming routes that no model of these shapes can take, such as a token out of range.
        """


def given_by_layer(given: Mapping[str, torch.Tensor], layers: Sequence[int]) -> dict[int, torch.Tensor]:
    """Routes ``given`` by name, of each of ``layers``. Raises ParityError for those of other layers, or of fewer."""
    names = [f"{ROUTES}{layer}" for layer in layers]
    if given.keys() != set(names):
        raise ParityError(f"routes {', '.join(sorted(given)) or 'none'}: expected {', '.join(names)}")
    return {layer: given[name] for layer, name in zip(layers, names, strict=True)}


@dataclass(frozen=True, eq=False)
class Task:
    """One task of a folder: float32 ``tensors`` by the names of ``TaskSpec.tensors``, with the steps of each
    axis where the checkpoint has them.

    ``choices`` are the values that the task was made for, of axes with choices. ``base_sha256`` is the hash that the
    folder states of the frozen weights, None where its format has none. ``facts`` are what else it states.
    """

    folder: Path
    tensors: Mapping[str, np.ndarray]
    files: tuple[Path, ...]
    base_sha256: str | None = None
    choices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    facts: Mapping[str, int | str] = field(default_factory=dict)

    def require_base(self, base_sha256: str) -> None:
        """Raises CheckpointError where the folder states other frozen weights than ``base_sha256``."""
        if self.base_sha256 is not None and self.base_sha256 != base_sha256:
            raise CheckpointError(
                f"{self.folder}: made for a base whose frozen weights have the hash {self.base_sha256[:16]}..., this "
                f"one's have {base_sha256[:16]}...; take the base that it was trained on"
            )


@dataclass(frozen=True, eq=False)
class TaskSpec:
    """How one model takes tasks of a ``kind``.

    ``tensors`` are parameters and constants of the module, by name, that every task has its own of. ``read(folder)``
    reads one; it raises CheckpointError for another model's, and for one whose structure engines do not have.
    ``reference(module)`` is what the gate compares with where that is not ``module`` with the task's tensors in it, and
    ``merged_workload`` the cost of a pass with a task in the weights, where it is another.
    """

    kind: TaskKind
    tensors: frozenset[str]
    read: Callable[[Path], Task]
    reference: Callable[[torch.nn.Module], torch.nn.Module] | None = None
    merged_workload: Callable[[Submodel, Bucket], list[Op]] | None = None


def hash_of(tensors: Mapping[str, np.ndarray]) -> str:
    """The hash of named float32 arrays: of each, by name, a line of JSON with name and shape, then its bytes
    (little-endian, row-major)."""
    digest = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        digest.update(json.dumps([name, list(array.shape)]).encode() + b"\n")
        digest.update(np.ascontiguousarray(array, np.dtype("<f4")).data)
    return digest.hexdigest()


# Computations that have several equal ways, to variant, to its operations; the first is what figures without a
# device count.
Variants = Mapping[str, Mapping[str, Sequence[Op]]]


# In ``variant_problems``, in the place of each variant.
EVERY_VARIANT = "*"


class Place(NamedTuple):
    """A parameter in the weight files: the name and the shape of its tensor, and the rows of that which it has,
    ``transposed`` where it is."""

    tensor: str
    shape: tuple[int, ...]
    rows: slice = slice(None)
    transposed: bool = False

    @property
    def is_part(self) -> bool:
        """Whether the tensor is not the parameter itself."""
        return self.transposed or self.rows != slice(None)


@dataclass(frozen=True, eq=False)
class Architecture:
    """Everything that the compiler asks of one model. All but the functions on modules is known without torch.

    Every model has:

    - ``spec``: axes, and the parameters that shrink with each; ``signature``: inputs and outputs.
    - ``parameter_shapes``: every parameter of the module by name, without those of ``modules``.
    - ``workload(submodel, bucket)``: the operations of one forward pass, without those of ``variants`` and ``modules``.
    - ``load()``: the user's own module in eval mode and float32, as attribute ``model`` of a wrapper whose ``forward``
      takes the signature's inputs by position and returns the outputs as a tuple; below ``model.`` parameters carry the
      names of ``spec``. Raises CheckpointError if weights are missing or misfit.

    Where a model has nothing of the kind, the rest stays as it is:

    - ``narrow(module, submodel)`` mends what of ``module``, whose parameters are narrowed already, repeats an axis
      value: attributes, and the layers behind the submodel's depth.
    - ``names_in_files``: parameter to tensor of the weight files, where files call it by another name.
    - ``stacked``: tensor of the weight files to the parameters that lie in it one above the other, where it is several.
    - ``transposed``: matrices that the weight files hold transposed.
    - ``is_embedding(parameter, full_shape)``: whether a parameter is a table of tokens or positions.
    - ``modules``: those of sentence-transformers behind the model; it has a mask and returns ``last_hidden_state``.
    - ``cached``: how a causal language model generates.
    - ``exits``: where the model can answer early, cut at all of them; ``spec`` then has an axis ``depth``.
    - ``routing``: what the model decides on the way.
    - ``variants(submodel, bucket)``: equal computations; the compiler takes the cheapest on the device.
    - ``variant_problems``: what is computed, to variants that other models have and this one has not (or
      ``EVERY_VARIANT``), to why.
    - ``onnxruntime_variants``: those with an operator that ONNX Runtime alone has, and in float32 alone.
    - ``lower(module, variants)``: what is traced in place of ``module``: the same function on the same parameters, in
      the variants chosen, with its routes after its outputs.
    - ``tasks``: which tensors are a task's own, of a model that was made for many tasks on frozen weights.
    - ``folded``: tensors that variants read in place of parameters, made of them once.
    - ``group_of(parameter)``: the group that ``inspect`` counts a parameter in beside its own, if any.
    - ``kept_whole``: what was found in a model that nobody described and cannot shrink, with the reason, a line each.
    - ``surveyed``: nobody has read the class, so that the gate also proves that padding changes no answer.
    - ``skippable``: layers that slices may leave out, since no other needs what they make.
    - ``prove_load(feeds)``: what ``load`` did to the stored weights, proven against them.
    """

    spec: ElasticSpec
    signature: Signature
    parameter_shapes: Mapping[str, tuple[int, ...]]
    workload: Callable[[Submodel, Bucket], list[Op]]
    load: Callable[[], torch.nn.Module]
    narrow: Callable[[torch.nn.Module, Submodel], None] | None = None
    names_in_files: Mapping[str, str] = field(default_factory=dict)
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    is_embedding: Callable[[str, tuple[int, ...]], bool] = is_table
    modules: SentenceModules | None = None
    exits: Exits | None = None
    cached: CachedSpec | None = None
    routing: Routing | None = None
    variants: Callable[[Submodel, Bucket], Variants] | None = None
    variant_problems: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    onnxruntime_variants: frozenset[str] = frozenset()
    lower: Callable[[torch.nn.Module, Mapping[str, str]], torch.nn.Module] | None = None
    tasks: TaskSpec | None = None
    folded: Folded | None = None
    group_of: Callable[[str], str | None] | None = None
    kept_whole: tuple[str, ...] = ()
    prove_load: Callable[[Arrays], Iterator[Proof]] | None = None
    surveyed: bool = False
    skippable: frozenset[int] = frozenset()

    def place_in_files(self, parameter: str, shape: tuple[int, ...]) -> Place:
        """Where the weight files have ``parameter``, a tensor of ``shape``."""
        if parameter in self._stacked_places:
            return self._stacked_places[parameter]
        name, is_turned = self.names_in_files.get(parameter, parameter), parameter in self.transposed
        return Place(name, tuple(shape)[::-1] if is_turned else tuple(shape), transposed=is_turned)

    @cached_property
    def _stacked_places(self) -> dict[str, Place]:
        places: dict[str, Place] = {}
        for tensor, parts in self.stacked.items():
            shapes = [self.parameter_shapes[part] for part in parts]
            whole, start = (sum(rows for rows, *_ in shapes), *shapes[0][1:]), 0
            for part, (rows, *_) in zip(parts, shapes, strict=True):
                places[part] = Place(tensor, whole, slice(start, start + rows))
                start += rows
        return places
