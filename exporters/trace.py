"""Traces a torch module into an ONNX graph for one bucket, with every parameter under its own name."""

from __future__ import annotations

import ast
import contextlib
import copy
import gc
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import onnx_ir as ir
import torch
from torch.distributions import Distribution
from torch.export import Dim, exported_program
from torch.export import _trace as export_trace
from torch.onnx._internal.exporter import _decomp, _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes import type_promotion

from ..bucket import Bucket
from ..bundle.entries.generation_entry import CAPACITY, LOGIT_COUNT, SOURCE, WINDOW
from ..errors import ExportError
from .equal_layers import shortened
from .frozen_dims import branching_dims, frozen_dims
from .onnx_translations import COMPLEX_TRANSLATIONS, TRANSLATIONS
from .repeated_layers import NAME_SCOPES, repeat_layers
from .signature import Interface
from .traced_alone import traced_alone
from .universal import PREFIX

_TypePromotion = type_promotion._TypePromotionInterpreter

_METHOD_NAME = "from_torchlib"

_ORIGINAL_METHOD = vars(ONNXRegistry)[_METHOD_NAME]

_read = cache(ONNXRegistry.from_torchlib)

_patched = Lock()


# Sizes that no other dimension of a traced model is likely to have.
_EXAMPLE_BATCH = 3
_EXAMPLE_SEQUENCE = 7
_EXAMPLE_OTHERS = {CAPACITY: 11, LOGIT_COUNT: 2, SOURCE: 13, WINDOW: 10}
# More than the windows of most models.
_LARGER = 2**13


@dataclass(frozen=True)
class Trace:
    """A traced graph, its weights still torch tensors, and the value that each submodule returns (its first output)."""

    model: ir.Model
    module_outputs: dict[str, str]


def trace(module: torch.nn.Module, interface: Interface, bucket: Bucket, opset: int) -> Trace:
    """Traces ``module``; dimensions that ``bucket`` leaves free, or does not know, keep their names, all others are
    static.

    A module that needs so many tokens to be traced for any number of them says so by ``example_tokens``. Weights are
    not folded, so every initializer keeps its parameter's name. Raises ExportError with torch's reason if the module
    does not export, or is another one for every size of a dimension that is to be free.
    """
    at = _example_shape(bucket, getattr(module, "example_tokens", _EXAMPLE_SEQUENCE))
    example = _example(interface, at)
    shorter = shortened(module, interface, example, *_larger(interface, bucket))
    if shorter is None:
        model = _exported(module, interface, bucket, opset, example)
    else:
        model = _exported(shorter.module, shorter, bucket, opset, _example(shorter, at))
        if not repeat_layers(model, shorter, module, interface):
            model = _exported(module, interface, bucket, opset, example)
    for value in model.graph.outputs:
        value.shape = _counted(value.shape)
    _require_free(module, interface, bucket, model)
    _name_outputs(interface, bucket, model)
    if bucket.free and getattr(module, "is_own_code", False):
        _require_one_branch(module, interface, bucket)
    _name_weights(model.graph, _own_names(module))
    return Trace(model, _module_outputs(model))


def _example(interface: Interface, at: Bucket) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.ones(spec.shape(at, _EXAMPLE_OTHERS), dtype=getattr(torch, spec.dtype)) for spec in interface.inputs
    )


def _larger(interface: Interface, bucket: Bucket) -> list[tuple[torch.Tensor, ...]]:
    """Inputs without numbers at the largest sizes that are free; none where no size is."""
    if not bucket.free and not any(dim in _EXAMPLE_OTHERS for spec in interface.inputs for dim in spec.dims):
        return []
    others = {name: size if name == LOGIT_COUNT else _LARGER + size for name, size in _EXAMPLE_OTHERS.items()}
    return [
        tuple(
            torch.ones(spec.shape(bucket.largest, others), dtype=getattr(torch, spec.dtype), device="meta")
            for spec in interface.inputs
        )
    ]


def _exported(
    module: torch.nn.Module, interface: Interface, bucket: Bucket, opset: int, example: tuple[torch.Tensor, ...]
) -> ir.Model:
    """The graph that torch.onnx.export makes of ``module``. Raises ExportError with torch's reason."""
    try:
        with quiet_export(), torchlib_read_once(), _without_collection(), _decomposed_at_once(opset):
            program = torch.onnx.export(
                module,
                example,
                dynamo=True,
                optimize=False,
                opset_version=opset,
                input_names=[spec.name for spec in interface.inputs],
                output_names=[spec.name for spec in interface.outputs],
                custom_translation_table=TRANSLATIONS,
                dynamic_shapes=_free_dims(module, interface, bucket),
                verbose=False,
            )
    except Exception as failure:  # torch.export raises many unrelated types for models it cannot trace
        reason = _reason(failure)
        raise ExportError(f"{type(module).__name__} at {bucket.label}: torch.onnx.export failed: {reason}") from failure
    assert program is not None
    return program.model


def _counted(shape: ir.Shape | None) -> ir.Shape | None:
    """A dimension of a size that torch.export worked out has that as its name."""
    return shape and ir.Shape([int(d) if isinstance(d, str) and d.isdigit() else d for d in map(_size, shape)])


def _size(dim: Any) -> Any:
    return dim if isinstance(dim, int) else dim.value


def _reason(failure: BaseException) -> str:
    """The first line of what torch.export itself said, which torch.onnx.export wraps in advice."""
    while failure.__cause__ is not None:
        failure = failure.__cause__
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0]


def _example_shape(bucket: Bucket, tokens: int) -> Bucket:
    """A small shape inside ``bucket``, of ``tokens`` if it may have so many; torch.export would take a free dimension
    of 1 to be always 1."""
    least = bucket.smallest
    return Bucket(
        least.batch if bucket.min_batch is None else min(bucket.batch, max(least.batch, _EXAMPLE_BATCH)),
        least.sequence if bucket.min_sequence is None else min(bucket.sequence, max(least.sequence, tokens)),
    )


def _free_dims(module: torch.nn.Module, interface: Interface, bucket: Bucket) -> Any:
    """The names of free dimensions by input and position, in the structure of ``module.forward``'s parameters."""
    dims = {
        name: Dim(name, min=getattr(bucket.smallest, name), max=getattr(bucket.largest, name)) for name in bucket.free
    }
    dims |= {name: Dim(name) for spec in interface.inputs for name in spec.dims if name in _EXAMPLE_OTHERS}
    if not dims:
        return None
    named = tuple({i: dims[dim] for i, dim in enumerate(spec.dims) if dim in dims} for spec in interface.inputs)
    parameters = list(inspect.signature(module.forward).parameters.values())
    first = next((number for number, each in enumerate(parameters) if each.kind is each.VAR_POSITIONAL), len(named))
    return (*named[:first], named[first:]) if first < len(named) else named


def _require_free(module: torch.nn.Module, interface: Interface, bucket: Bucket, model: ir.Model) -> None:
    """Checks that free dimensions are free: where the module fixes a size, torch.onnx.export goes back to a static
    graph."""
    for spec, value in zip(interface.inputs, model.graph.inputs, strict=True):
        found = tuple(_size(dim) for dim in value.shape or ())
        if found != spec.declared(bucket):
            wrapped = getattr(module, PREFIX.rstrip("."), module)
            at = _example_shape(bucket, getattr(module, "example_tokens", _EXAMPLE_SEQUENCE))
            where = frozen_dims(module, interface.inputs, at, bucket.free)
            said = "; ".join(f"{dim} is frozen{line}" for dim, line in where.items()) or (
                f"input {spec.name} has shape {list(found)} where {list(spec.declared(bucket))} was requested"
            )
            raise ExportError(
                f"{type(wrapped).__name__} at {bucket}: the module is made for one size: {said}; ask for static "
                "buckets, such as 1x64; a module of your own may use the size as it is, without int() or a "
                "loop over it"
            )


def _name_outputs(interface: Interface, bucket: Bucket, model: ir.Model) -> None:
    """Declares a dimension of an output by its name where torch.export has only an expression of it, such as
    ``Min(sequence, 4*((sequence + 3)//4))`` of what was filled up to a multiple of 4 and cut back: the gate compares
    shapes too."""
    for spec, value in zip(interface.outputs, model.graph.outputs, strict=False):
        found, declared = [isinstance(dim, int) for dim in value.shape or ()], spec.declared(bucket)
        if found == [isinstance(dim, int) for dim in declared]:
            value.shape = ir.Shape(declared)


def _require_one_branch(module: torch.nn.Module, interface: Interface, bucket: Bucket) -> None:
    """Checks that the code of a module takes the same way at every size of ``bucket``: torch.export drops what it asks
    of a size."""
    at = _example_shape(bucket, getattr(module, "example_tokens", _EXAMPLE_SEQUENCE))
    found = branching_dims(module, interface.inputs, at, bucket)
    if found:
        name = type(getattr(module, PREFIX.rstrip("."), module)).__name__
        said = "; ".join(f"it branches on {size}{line}" for size, line in found.items())
        raise ExportError(
            f"{name} at {bucket}: the module does other things at some sizes: {said}; ask for static buckets, or let "
            "it do the same at every size"
        )


def _name_weights(graph: ir.Graph, own: Mapping[str, str]) -> None:
    """Gives every initializer its parameter's ``own`` name, one for all of a tied one."""
    for name, value in sorted(graph.initializers.items(), key=lambda each: own.get(each[0], each[0]) != each[0]):
        stated = own.get(name, name).removeprefix(PREFIX)
        if name in own and own[name] != name and stated in graph.initializers:
            ir.convenience.replace_all_uses_with(value, graph.initializers[stated])
            del graph.initializers[name]
        else:
            value.name = stated


def _own_names(module: torch.nn.Module) -> dict[str, str]:
    """Every name of a parameter to its first, which is its own: torch.export may choose another of a tied one."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def _module_outputs(model: ir.Model) -> dict[str, str]:
    """Module name to the value it returns: the last value made inside the module's scope."""
    outputs: dict[str, str] = {}
    for node in model.graph:
        # The last name is the node's own; nodes of one module have the others in common.
        for module in _modules(node.metadata_props.get(NAME_SCOPES, "").rpartition(", ")[0]):
            outputs[module] = node.outputs[0].name or ""
    return outputs


@cache
def _modules(scopes: str) -> tuple[str, ...]:
    """Modules in the text of a list of names that is not closed."""
    return tuple(scope.removeprefix(PREFIX) for scope in ast.literal_eval(f"{scopes}]" if scopes else "[]") if scope)


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """torch.onnx.export prints progress and warns about its own internals; neither helps the user."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Without searches for garbage among the millions of objects that an export makes and keeps,
    and for the line of the model behind every node."""
    collects, config = gc.isenabled(), torch.fx.config
    says_lines = config.do_not_emit_stack_traces
    gc.disable()
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = says_lines
        if collects:
            gc.enable()


@contextlib.contextmanager
def _decomposed_at_once(opset: int) -> Iterator[None]:
    """torch.onnx.export traces a module, and then the trace once more with operations decomposed into those that ONNX
    has. Within it the first trace has them decomposed already: the same graph in two thirds of the time. Nor is the
    trace run again to find types that ONNX does not promote: what a node returns is known from the first trace."""
    to_aten, for_training, decompose, run_node = (
        export_trace._export_to_aten_ir,
        export_trace._export_for_training,
        _fx_passes.decompose_with_registry,
        _TypePromotion.run_node,
    )

    def decomposed(module: torch.nn.Module, *args: Any, **given: Any) -> Any:
        known = {*_decomp.get_onnx_implemented_overloads(_read(opset)), *TRANSLATIONS}
        table: Any = _decomp.create_onnx_friendly_decomposition_table(known)
        composite, others = exported_program._split_decomp_table_to_cia_and_python_decomp(table)
        with exported_program._override_composite_implicit_decomp(composite):
            try:
                with traced_alone(module):
                    return to_aten(module, *args, **given, decomp_table=others)
            except Exception:  # noqa: BLE001  (it writes, or has no trace: torch looks first, and says so in its words)
                return to_aten(module, *args, **given, decomp_table=others)

    # Distributions check values, of which such a trace knows none; what they return is the same.
    checks = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    setattr(export_trace, to_aten.__name__, decomposed)
    setattr(export_trace, for_training.__name__, export_trace._export)
    setattr(_fx_passes, decompose.__name__, lambda program, *_: program)
    setattr(_TypePromotion, run_node.__name__, _promoted)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checks)
        setattr(export_trace, to_aten.__name__, to_aten)
        setattr(export_trace, for_training.__name__, for_training)
        setattr(_fx_passes, decompose.__name__, decompose)
        setattr(_TypePromotion, run_node.__name__, run_node)


def _promoted(self: _TypePromotion, node: torch.fx.Node) -> Any:
    """Value of ``node``, with its arguments promoted; one that promotion changed was run again there."""
    if node.op != "call_function" or "val" not in node.meta:
        return torch.fx.Interpreter.run_node(self, node)
    rule = type_promotion.get_type_promotion_rule(node, self.type_promotion_table)
    if rule is not None:
        with self._set_current_node(node):
            self._maybe_promote_node(node, rule)
    return node.meta["val"]


@contextlib.contextmanager
def torchlib_read_once() -> Iterator[None]:
    """An export inside takes the registry that the first one built, as a copy to which it may add translations."""
    with _patched:
        setattr(ONNXRegistry, _METHOD_NAME, staticmethod(_copy))
        try:
            yield
        finally:
            setattr(ONNXRegistry, _METHOD_NAME, _ORIGINAL_METHOD)


def _copy(opset_version: int) -> ONNXRegistry:
    registry = copy.copy(_read(opset_version))
    registry.functions = {target: list(functions) for target, functions in registry.functions.items()}
    for target, function in COMPLEX_TRANSLATIONS.items():
        registry.register_op(target, function, is_complex=True)
    return registry
