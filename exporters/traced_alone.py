"""torch.export runs a module to see what it writes into, and then once more to trace it. Most write into nothing, and
the trace alone shows whether this one does: the same graph, in two thirds of the time where sizes are free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._functorch import aot_autograd
from torch._functorch._aot_autograd.frontend_utils import _detect_attribute_assignment
from torch._functorch._aot_autograd.functional_utils import has_data_mutation
from torch._functorch._aot_autograd.schemas import InputAliasInfo, OutputAliasInfo, OutputType, ViewAndMutationMeta
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

_LOOK = "run_functionalized_fw_and_collect_metadata"


class WritesError(Exception):
    """A module writes into what it is given."""


@contextlib.contextmanager
def traced_alone(module: torch.nn.Module) -> Iterator[None]:
    """Within it an export of ``module`` only traces it. Raises WritesError where that writes into an input, a parameter
    or a buffer: then torch has to look first."""
    outputs: list[OutputAliasInfo] = []

    def look(root: torch.nn.Module, given: Any, answer: Any) -> None:
        read = pytree.tree_leaves((given, dict(root.named_parameters()), dict(root.named_buffers())))
        if any(map(has_data_mutation, read)):
            raise WritesError
        outputs[:] = [_output()] * len(pytree.tree_leaves(answer))

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
    """What torch would find of a module that writes into nothing. ``outputs`` are filled when it is traced."""
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
