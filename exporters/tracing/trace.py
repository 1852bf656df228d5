"""Traces a torch module into an ONNX graph at one bucket, with every parameter under its own name."""

from __future__ import annotations

import ast
import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir
import torch

from ...elastic import Bucket
from ...errors import ExportError
from ...runtime.bundle.manifest import TensorSpec
from ..universal import PREFIX
from .onnx_translations import TRANSLATIONS
from .torchlib import torchlib_read_once

_SCOPES_KEY = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True)
class Trace:
    """A traced graph, its weights still torch tensors, and the value that each submodule returns (its first output)."""

    model: ir.Model
    module_outputs: dict[str, str]


class Interface(Protocol):
    """Inputs and outputs of a traced module, by position: those of a whole model or of a segment."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...


def trace(module: torch.nn.Module, interface: Interface, bucket: Bucket, opset: int) -> Trace:
    """Traces ``module`` with static shapes. Weights are not folded, so every initializer keeps its parameter's name.

    Raises ExportError with torch's reason if the module does not export.
    """
    example = tuple(torch.ones(spec.shape(bucket), dtype=getattr(torch, spec.dtype)) for spec in interface.inputs)
    try:
        with quiet_export(), torchlib_read_once():
            program = torch.onnx.export(
                module,
                example,
                dynamo=True,
                optimize=False,
                opset_version=opset,
                input_names=[spec.name for spec in interface.inputs],
                output_names=[spec.name for spec in interface.outputs],
                custom_translation_table=TRANSLATIONS,
                verbose=False,
            )
    except Exception as failure:  # torch.export raises many unrelated types for models it cannot trace
        reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
        raise ExportError(f"{type(module).__name__} at {bucket.label}: torch.onnx.export failed: {reason}") from failure
    assert program is not None
    model = program.model
    own = _own_names(module)
    for name, value in list(model.graph.initializers.items()):
        value.name = own.get(name, name).removeprefix(PREFIX)
    return Trace(model, _module_outputs(model))


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
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES_KEY, "[]"))[:-1]
        for scope in scopes:
            if scope:
                outputs[scope.removeprefix(PREFIX)] = node.outputs[0].name or ""
    return outputs


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
