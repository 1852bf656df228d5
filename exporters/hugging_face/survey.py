"""A class of transformers, surveyed on itself: built without weights and run without numbers.

The model is made from its configuration on the meta device and passes run on fake tensors, which have a shape and no
memory. From them come its parameters, its outputs with their dimensions, and the operations of a pass.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ...bucket import Bucket
from ...bundle.entries.tensor_spec import Role, TensorSpec
from ...elastic import Submodel
from ...errors import CheckpointError, ExportError, InputError, UnsupportedModelError
from ...workload import Op, OpKind
from ..checkpoints.checkpoint import Checkpoint
from ..modules.layers import part_layers
from ..own_lines import line_of
from ..signature import IDS, MASK, TYPE_IDS, WRITTEN_IDS, Signature
from ..torch_internals import FAKE_TENSOR_LOG, FakeTensorMode, TorchDispatchMode, storage, with_part
from .class_inputs import configs_of, data_of, depth, inputs_of, is_causal, positions, vocabulary
from .found_axes import FoundAxes, find_axes
from .interface import BOX_PLACES, BOXES, Loading
from .kept_layers import KeptLayers, find_kept
from .tensors import Shape
from .transformers_model import TransformersModule, caches_unused, class_of, settle

# Tokens of the longest text where no configuration states a number of positions.
_USUAL_POSITIONS = 2048
_aten = torch.ops.aten
_TABLE_READS = {_aten.embedding.default, _aten.index_select.default, _aten.gather.default}
_CPU_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu
# Shapes by which dimensions of outputs are told apart: sizes that no other dimension is likely to have.
_ROWS, _MORE_ROWS = 2, 3
# Operators that have a form in ONNX.
_NAMESPACES = ("aten", "prim", "prims", "torchvision", "onnx", "onnx_symbolic")
# The counted pass of a model that reads ids, or an array.
Run = Callable[[Any, torch.Tensor], Any]
# Costs of operations of one kind.
_COSTS = ("flops", "weight_bytes", "activation_bytes")


@dataclass(frozen=True)
class Survey:
    """A class as ``config.json`` describes it. ``module`` takes the signature's inputs, its parameters fake; ``axes``
    are those found in the model that it wraps. ``kept`` is what a causal one keeps of each token, or why it cannot
    generate; None of any other."""

    module: TransformersModule
    fake: FakeTensorMode
    shapes: Mapping[str, Shape]
    signature: Signature
    depth: int
    axes: FoundAxes
    kept: KeptLayers | str | None = None

    @property
    def vocabulary(self) -> int:
        """Tokens that the model reads."""
        return vocabulary(self.module.model)

    def example(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Fake inputs at ``bucket``, by name."""
        return fake_inputs(self.fake, self.signature.inputs, bucket)

    def ops(self, bucket: Bucket, submodel: Submodel | None = None, run: Run | None = None) -> list[Op]:
        """The operations of one pass, or of what ``run`` makes of the model, of the universal one or cut to
        ``submodel``."""
        names = {storage(parameter): name for name, parameter in self.module.model.named_parameters()}
        counter, module = _Counter(names), self.module
        with self.fake, torch.no_grad(), caches_unused():
            if submodel is not None:
                module = with_part(module, "model", self.axes.cut(module.model, submodel))
            with counter:
                module.answer(self.example(bucket)) if run is None else run(
                    module.model, next(iter(self.example(bucket).values()))
                )
        return counter.ops

    def between(self, whole: Sequence[Op], half: Sequence[Op], submodel: Submodel) -> list[Op]:
        """The operations of ``submodel``, of those of the universal model and of half of every axis: each grows evenly
        with the axis of the weights that it reads, or that were read last."""
        axes = {cut.parameter.rpartition(".")[0]: cut.axis for cut in self.axes.slices}
        kept = {
            axis.name: (submodel[axis.name] - least) / max(axis.size - least, 1)
            for axis, least in self.axes.half.values
        }
        found, axis, rest = [], None, list(half)
        for op in whole:
            # A single head needs no copy in another order.
            least = rest.pop(0) if rest and _what(op) == _what(rest[0]) else op
            axis = axes.get(op.name, axis)
            share = 1.0 if axis is None else kept[axis]
            costs = ((getattr(least, cost), getattr(op, cost)) for cost in _COSTS)
            found.append(Op(op.name, op.kind, *(max(0, round(low + share * (high - low))) for low, high in costs)))
        return found


def survey(checkpoint: Checkpoint, loading: Loading) -> Survey:
    """The class that ``config.json`` names. Raises UnsupportedModelError, one line, for one whose inputs or outputs are
    not understood and for one that does not run; CheckpointError for a configuration that makes no sense."""
    config, cls, options = class_of(checkpoint, loading)
    with refused(checkpoint, cls.__name__):
        with torch.device("meta"):
            model = cls(config, **options)
        _require_honoured(checkpoint, model)
        model.tie_weights()
        settle(model, loading)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        model = faked(model, fake)
    with refused(checkpoint, cls.__name__):
        signature = _first_that_runs(model, fake, loading)
    module = TransformersModule(model, signature, None, loading)
    axes = axes_of(checkpoint, module, fake, signature)
    with refused(checkpoint, cls.__name__):
        kept = kept_by(model, fake, signature, axes)
    return Survey(module, fake, shapes_of(model), signature, depth(model), axes, kept)


def shapes_of(model: torch.nn.Module) -> dict[str, Shape]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def kept_by(model: Any, fake: FakeTensorMode, signature: Signature, axes: FoundAxes) -> KeptLayers | str | None:
    """The cache that ``model`` keeps of each token, or why it cannot generate; None where it is not causal."""
    logits = next((spec for spec in signature.outputs if spec.role == "next_tokens"), None)
    if logits is None:
        return None
    names = {spec.name for spec in signature.inputs}
    others = names - {IDS, MASK, TYPE_IDS, WRITTEN_IDS}
    if others and (len(names) != 2 or WRITTEN_IDS not in names):  # an array alone, which an encoder reads
        return f"{type(model).__name__} takes {', '.join(sorted(others))} beside the text"
    if logits.dims[-1] != vocabulary(model):
        return f"{type(model).__name__} reads {vocabulary(model)} tokens and scores {logits.dims[-1]}"
    positions = signature.max_sequence or 1
    first, *_ = fake_inputs(fake, signature.inputs, Bucket(_ROWS, min(12, positions))).values()
    with fake:
        ids = torch.ones((_ROWS, min(12, positions)), dtype=torch.int64)
        return find_kept(model, ids, first, axes, positions)


def axes_of(
    checkpoint: Checkpoint,
    module: TransformersModule,
    fake: FakeTensorMode,
    signature: Signature,
    length: int | None = None,
) -> FoundAxes:
    """The axes of the model that ``module`` wraps, followed at this ``length``; its layers are taken apart for them.
    Raises UnsupportedModelError as ``survey``."""
    length = length or min(12, signature.max_sequence or 1)
    example = fake_inputs(fake, signature.inputs, Bucket(_MORE_ROWS, length))
    with refused(checkpoint, type(module.model).__name__):
        if module.given is not None:
            example = module.given(example)
        axes = find_axes(module.model, (), example)
        part_layers(module.model, axes.parted)
        return axes


def workload_of(
    checkpoint: Checkpoint, found: Survey, run: Run | None = None
) -> Callable[[Submodel, Bucket], list[Op]]:
    """The operations of a pass, or of ``run``, of a submodel at a bucket, for ``Architecture.workload``."""
    counted: dict[Bucket, tuple[list[Op], list[Op]]] = {}

    def workload(submodel: Submodel, bucket: Bucket) -> list[Op]:
        shape = bucket.largest
        if shape not in counted:
            with refused(checkpoint, type(found.module.model).__name__):
                counted[shape] = found.ops(shape, None, run), found.ops(shape, found.axes.half, run)
        return found.between(*counted[shape], submodel)

    return workload


def step_workload(
    checkpoint: Checkpoint, found: Survey, read: Run, step: Run
) -> Callable[[Submodel, Bucket], list[Op]]:
    """The operations that ``step`` has behind those of ``read``, with which it begins."""
    reading, both = (workload_of(checkpoint, found, run) for run in (read, step))
    return lambda submodel, bucket: both(submodel, bucket)[len(reading(submodel, bucket)) :]


def _require_honoured(checkpoint: Checkpoint, model: Any) -> None:
    """Raises CheckpointError for an input without which the answers are another model's, and for a kind of positions
    that no module of ``model`` reads."""
    if BOXES in inspect.signature(model.forward).parameters and not getattr(model.config, BOX_PLACES, None):
        name = type(model).__name__
        raise checkpoint.misfit(f"{name} reads places of words (bbox) of no number of places ({BOX_PLACES})")
    if getattr(model.config, "type_vocab_sizes", None) is not None:
        raise checkpoint.misfit("type_vocab_sizes: several types of each token are not supported")
    key = "position_embedding_type"
    stated = {part.get(key) for part in (checkpoint.config, *checkpoint.config.values()) if isinstance(part, Mapping)}
    usual = {getattr(type(part)(), key, None) for part in configs_of(model.config)}  # of the class's own, as DETR's
    if stated <= {None, "absolute", *usual}:
        return
    files = {type(module).__module__ for module in model.modules()}
    if not any(key in inspect.getsource(sys.modules[name]) for name in files if ".models." in name):
        raise checkpoint.misfit(
            f"{key}: {', '.join(sorted(str(kind) for kind in stated if kind))[:80]} is not supported: the model's "
            "class would pass over it and use its own"
        )


@contextmanager
def refused(checkpoint: Checkpoint, name: str) -> Iterator[None]:
    """Whatever the class raises, as one line that says where in the model; PyTorch's own log of it is left out."""
    log = logging.getLogger(FAKE_TENSOR_LOG)
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except (CheckpointError, InputError):
        raise
    except Exception as failure:  # of any kind: the code of hundreds of models
        raise UnsupportedModelError(
            f"{checkpoint.stated_in}: {name} does not run without numbers{line_of(failure)}: {reason(failure)}"
        ) from failure
    finally:
        log.setLevel(before)


def reason(failure: BaseException) -> str:
    """Failure of a pass on fake tensors or of an export, in words of the user's."""
    kind, said = type(failure).__name__, " ".join(str(failure).split())
    if "DataDependent" in kind or "DynamicOutputShape" in kind:
        return (
            "what runs depends on values there, which no graph can; choose by torch.where, or take a class or "
            "configuration without it"
        )
    return said if isinstance(failure, ExportError) else f"{kind}: {said}"[:300]


def faked(model: Any, fake: FakeTensorMode) -> Any:
    """A copy in eval mode whose tensors are fake ones on the processor; ties stay."""
    memo: dict[int, object] = {}
    with fake:
        for parameter in model.parameters():
            made = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            memo[id(parameter)] = torch.nn.Parameter(made, requires_grad=False)
        plain = [each for part in model.modules() for each in vars(part).values() if _is_tensor(each)]
        for tensor in (*model.buffers(), *plain):
            memo[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return copy.deepcopy(model, memo).eval().requires_grad_(False)


def fake_inputs(fake: FakeTensorMode, specs: Sequence[TensorSpec], bucket: Bucket) -> dict[str, torch.Tensor]:
    with fake:
        return {s.name: torch.ones(s.shape(bucket), dtype=getattr(torch, s.dtype)) for s in specs}


def _first_that_runs(model: Any, fake: FakeTensorMode, loading: Loading) -> Signature:
    """The signature with the first of ``inputs_of`` that a pass runs on. Raises what the very first met."""
    first: BaseException = TypeError(
        f"none of its inputs is known: {', '.join(inspect.signature(model.forward).parameters)}"
    )
    (longest, why), every = positions(model), tuple[TensorSpec, ...]()
    data = list(data_of(model))
    for inputs in inputs_of(model):
        has_sequence = any("sequence" in spec.dims for spec in inputs)
        mask = next((spec.name for spec in inputs if spec.row_needs is not None), None)
        every = every or inputs
        taken = [spec.name for spec in inputs]
        without = [spec.name for spec in every if spec.name not in taken]
        shortened = why if has_sequence else None
        most = (longest or _USUAL_POSITIONS) if has_sequence else None
        others = [name for name in data if name not in (*taken, *without)]
        said = []
        if without:
            said.append(f"{', '.join(without)}: left out, since with it the class does not run: {reason(first)}")
        if others:
            said.append(f"inputs of the class that engines do not take: {', '.join(others)}")
        signature = Signature(inputs, (), most, mask, shortened=shortened)
        module = TransformersModule(model, signature, None, loading)
        try:
            outputs, lost = output_specs(module, fake, signature, is_causal(model))
            if not outputs:
                given = ", ".join(spec.name for spec in inputs)
                raise ExportError(
                    f"it returns nothing per row of {given}; expected float tensors with the batch in front"
                )
            if lost:
                said.append(f"outputs that engines do not have (not of float rows): {', '.join(lost)}")
            return replace(signature, outputs=outputs, left_out="; ".join(said) or None)
        except Exception as failure:  # noqa: BLE001  (of any kind, and raised below)
            first = failure if inputs is every else first
    raise first


def output_specs(
    module: TransformersModule,
    fake: FakeTensorMode,
    signature: Signature,
    follows: bool,
    lengths: tuple[int, int] | None = None,
) -> tuple[tuple[TensorSpec, ...], list[str]]:
    """The float outputs that have rows, and the names of other tensors; a dimension that grows with the tokens and is
    not their number leaves one out. It is told by passes at both ``lengths``."""
    most = signature.max_sequence or 1
    short, long = lengths or (12 if most > 12 else max(1, most // 2), min(19, most))

    def shapes(bucket: Bucket) -> dict[str, Shape]:
        with fake, torch.no_grad(), caches_unused(), OwnOperators():  # type: ignore[no-untyped-call]
            found = module.answer(fake_inputs(fake, signature.inputs, bucket))
        tensors = {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}
        return {n: tuple(map(int, each.shape)) if each.is_floating_point() else () for n, each in tensors.items()}

    few, more, longer = (shapes(Bucket(*at)) for at in ((_ROWS, short), (_MORE_ROWS, short), (_ROWS, long)))
    specs, lost = [], []
    for name, shape in few.items():
        sizes = zip(shape, more.get(name, ()), longer.get(name, ()), strict=False)
        dims = tuple(_dim(each, (short, long)) for each in sizes)
        if len(dims) == len(shape) and dims[:1] == ("batch",) and "batch" not in dims[1:] and None not in dims:
            role: Role | None = "next_tokens" if follows and name == "logits" else None
            specs.append(TensorSpec(name, "float32", tuple(dim for dim in dims if dim is not None), role=role))
        else:
            lost.append(name)
    return tuple(specs), lost


def _dim(sizes: tuple[int, int, int], lengths: tuple[int, int]) -> str | int | None:
    few, more, longer = sizes
    if (few, more, longer) == (_ROWS, _MORE_ROWS, _ROWS):
        return "batch"
    if few != more:
        return None
    if few == longer:
        return few
    return "sequence" if (few, longer) == lengths else None


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation of a pass that moves numbers, with its cost."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self.ops: list[Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            self._count(func, args, kwargs or {}, found)
        return found

    def _count(self, func: Any, args: Sequence[Any], named: Mapping[str, Any], found: Any) -> None:
        given = [*args, *named.values()]
        tensors = [each for each in given if isinstance(each, torch.Tensor)]
        tensors += [each for some in given if isinstance(some, (list, tuple)) for each in some if _is_tensor(each)]
        made = [each for each in (found if isinstance(found, (list, tuple)) else (found,)) if _is_tensor(each)]
        weights = [tensor for tensor in tensors if storage(tensor) in self._names]
        written = sum(map(_bytes, made))
        if func in _TABLE_READS:
            self.ops.append(Op(self._name(func, weights), "gather", 0, written if weights else 0, 2 * written))
            return
        read = sum(_bytes(tensor) for tensor in tensors if storage(tensor) not in self._names)
        count = flop_registry.get(func.overloadpacket)
        kind: OpKind = "elementwise"
        flops = sum(each.numel() for each in made)
        if func.overloadpacket is _CPU_ATTENTION:
            query, key = tensors[:2]
            kind, flops = "batched_gemm", 4 * query.numel() * int(key.shape[-2])
            read += 2 * flops // int(query.shape[-1])  # scores, which a graph writes and reads
        elif count is not None:
            kind = "gemm" if weights else "batched_gemm"
            flops = int(count(*args, **named, out_val=found))
        self.ops.append(Op(self._name(func, weights), kind, flops, sum(map(_bytes, weights)), read + written))

    def _name(self, func: Any, weights: Sequence[torch.Tensor]) -> str:
        kind = func.overloadpacket.__name__
        return self._names[storage(weights[0])].rpartition(".")[0] if weights else f"{len(self.ops)}.{kind}"


class OwnOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises ExportError for an operation that is not PyTorch's own."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace not in _NAMESPACES:
            name = f"{func.namespace}::{func.overloadpacket.__name__}"
            raise ExportError(
                f"{name} is a custom operator, which no graph has; compute it by PyTorch's own operations"
            )
        return func(*args, **(kwargs or {}))


def _what(op: Op) -> str:
    """The weights that an operation reads, or what it is."""
    return op.name.lstrip("0123456789.")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel()) * tensor.element_size()
