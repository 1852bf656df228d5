"""torch.onnx.export made faster: it traces, decomposes, looks for types and builds its tables twice or more where once
is enough.

It has no option for any of this, so functions inside of it are exchanged while one export runs, as torch 2.13 has them
(pyproject.toml pins it). No other module uses names of torch.export and torch.onnx that are not public;
torch_internals.py has those of its tensors and passes. Graphs are the same with and without, which tests hold.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch._export.utils import _compiling_state_context
from torch._functorch import aot_autograd
from torch._functorch._aot_autograd.frontend_utils import _detect_attribute_assignment
from torch._functorch._aot_autograd.functional_utils import has_data_mutation
from torch._functorch._aot_autograd.schemas import InputAliasInfo, OutputAliasInfo, OutputType, ViewAndMutationMeta
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributions import Distribution
from torch.export import _trace as export_trace
from torch.export import exported_program
from torch.onnx._internal.exporter import _decomp, _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes import type_promotion

from .onnx_translations import COMPLEX_TRANSLATIONS, TRANSLATIONS
from .torch_internals import tree_leaves

_TypePromotion = type_promotion._TypePromotionInterpreter

_METHOD_NAME = "from_torchlib"

_ORIGINAL_METHOD = vars(ONNXRegistry)[_METHOD_NAME]

_read = cache(ONNXRegistry.from_torchlib)

_patched = Lock()

_LOOK = "run_functionalized_fw_and_collect_metadata"

# Operations on shapes alone, within an export's view of what is compiled: what a class asks of it is answered as there.
compiling_state = _compiling_state_context


@contextlib.contextmanager
def decomposed_at_once(opset: int) -> Iterator[None]:
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


class WritesError(Exception):
    """A module writes into what it is given."""


@contextlib.contextmanager
def traced_alone(module: torch.nn.Module) -> Iterator[None]:
    """Within it an export of ``module`` only traces it: the same graph, in two thirds of the time where sizes are free.

    torch.export runs a module to see what it writes into, and then once more to trace it. Most write into nothing, and
    the trace alone shows whether this one does. Raises WritesError where it writes into an input, a parameter or a
    buffer: then torch has to look first."""
    outputs: list[OutputAliasInfo] = []

    def look(root: torch.nn.Module, given: Any, answer: Any) -> None:
        read = tree_leaves((given, dict(root.named_parameters()), dict(root.named_buffers())))
        if any(map(has_data_mutation, read)):
            raise WritesError
        outputs[:] = [_output()] * len(tree_leaves(answer))

    def known(*_: Any, static_input_indices: Any, keep_input_mutations: bool, **__: Any) -> Any:
        return lambda *given: _meta(given, outputs, static_input_indices, keep_input_mutations)

    patched: Any = vars(aot_autograd)[_LOOK]
    hook = module.register_forward_hook(look)
    setattr(aot_autograd, _LOOK, known)
    try:
        with _detect_attribute_assignment(module):
            yield
    finally:
        setattr(aot_autograd, _LOOK, patched)
        hook.remove()


def _meta(given: Sequence[Any], outputs: list[OutputAliasInfo], static: Any, keeps: bool) -> ViewAndMutationMeta:
    """Metadata that torch would find of a module that writes into nothing. ``outputs`` are filled when it is traced."""
    read = InputAliasInfo(
        is_leaf=True,
        mutates_data=False,
        mutates_metadata=False,
        mutations_hidden_from_autograd=True,
        mutations_under_no_grad_or_inference_mode=False,
        mutation_inductor_storage_resize=False,
        mutates_storage_metadata=False,
        requires_grad=False,
        keep_input_mutations=keeps,
    )
    return ViewAndMutationMeta(
        input_info=[read] * len(given),
        output_info=outputs,
        num_intermediate_bases=0,
        keep_input_mutations=keeps,
        traced_tangents=[],
        traced_tangents_descs=[],
        subclass_inp_meta=[],
        subclass_fw_graph_out_meta=[],
        subclass_tangent_meta=[],
        static_input_indices=static,
    )


def _output() -> OutputAliasInfo:
    return OutputAliasInfo(
        OutputType.non_alias, FunctionalTensor, None, None, requires_grad=False, requires_grad_for_backward=False
    )
