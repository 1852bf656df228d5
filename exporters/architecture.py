"""One model as its family reads it, once, from configuration and tensor headers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ..bucket import Bucket
from ..bundle.manifest import Proof
from ..elastic import ElasticSpec, Submodel
from ..runtime.inputs.arrays import Arrays
from ..workload import Op
from .cached_form import CachedForm
from .exits import Exits
from .folded import Folded
from .parameter_groups import is_table
from .routing import Routing
from .sentence_transformers.read_modules import SentenceModules
from .signature import Signature
from .tasks.task_form import TaskForm

if TYPE_CHECKING:  # plans are made without torch
    import torch

# What is computed in one of several equal ways, to variant, to its operations; the first is what figures without a
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
    cached: CachedForm | None = None
    routing: Routing | None = None
    variants: Callable[[Submodel, Bucket], Variants] | None = None
    variant_problems: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    onnxruntime_variants: frozenset[str] = frozenset()
    lower: Callable[[torch.nn.Module, Mapping[str, str]], torch.nn.Module] | None = None
    tasks: TaskForm | None = None
    folded: Folded | None = None
    group_of: Callable[[str], str | None] | None = None
    prove_load: Callable[[Arrays], Iterator[Proof]] | None = None

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
