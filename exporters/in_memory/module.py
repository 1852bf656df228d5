"""A module of the user's as compiled models are: inputs by position, outputs in the signature's order."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ...bucket import MAX_TOKENS, Bucket
from ...bundle.entries.tensor_spec import TensorSpec
from ...errors import CheckpointError, ExportError, InputError
from ...outside import library_errors
from ..checkpoints.own_folder import is_finite
from ..hugging_face import survey
from ..hugging_face.passes import nothing_left
from ..hugging_face.transformers_model import TransformersModule, one_sequence_a_row
from ..modules.layers import part_layers
from ..own_lines import line_of
from ..signature import Signature
from ..torch_internals import FakeTensorMode
from .checkpoint import ModuleInMemory

# Beyond so many no search for the longest sequence goes.
_SEARCHED = 2048
# Parts with weights that a layer has, as attention and an FFN have them.
_WEIGHTED_PER_LAYER = 6


def named_outputs(found: Any, at: str = "") -> dict[str, torch.Tensor]:
    """The tensors of what a module returns, by their place in its structure: ``output`` alone, keys of mappings and
    fields, ``output_0`` and so on of a sequence; further in, joined by a dot. Raises InputError for two of one name."""
    if isinstance(found, torch.Tensor):
        return {at or "output": found}
    if dataclasses.is_dataclass(found) and not isinstance(found, Mapping | type):
        found = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    elif isinstance(found, tuple) and hasattr(found, "_fields"):
        found = dict(zip(found._fields, found, strict=True))
    if isinstance(found, list | tuple):
        found = {str(number) if at else f"output_{number}": each for number, each in enumerate(found)}
    if not isinstance(found, Mapping):
        return {}
    tensors: dict[str, torch.Tensor] = {}
    for name, each in found.items():
        further = named_outputs(each, f"{at}.{name}" if at else str(name))
        if twice := tensors.keys() & further.keys():
            raise InputError(f"model: two outputs are called {min(twice)!r:.80}; give one of them another name")
        tensors |= further
    return tensors


@contextmanager
def plainly() -> Iterator[None]:
    """Within it PyTorch's layers of transformers compute by plain operations, where they have one fused operation for
    passes without gradients that no graph has."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class PlainModule(TransformersModule):
    """Calls the user's module by keyword; it runs on sequences of ``length``."""

    is_own_code = True

    def __init__(self, model: torch.nn.Module, signature: Signature, length: int) -> None:
        super().__init__(model, signature)
        self.example_tokens = max(length, 2)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Raises ExportError, one line, where the module does not run."""
        if torch.compiler.is_exporting():
            return super().forward(*tensors)
        name = type(self.model).__name__
        shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in zip(self.inputs, tensors, strict=True))
        try:
            found = super().forward(*tensors)
        except Exception as failure:  # of any kind: the user's code
            raise ExportError(
                f"{name} does not run on {shapes}{line_of(failure)}: {survey.reason(failure)}; ask for `buckets` that "
                "it takes"
            ) from failure
        if not all(bool(torch.isfinite(tensor).all()) for tensor in found):
            raise ExportError(
                f"{name} answers with NaN or infinite numbers on {shapes}, which no engine can be held to: inputs of "
                "the comparison are standard normal, so bring them into the range that it needs within the module"
            )
        return found

    def answer(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with (
            plainly(),
            one_sequence_a_row(),
            nothing_left(self.model),
        ):  # the user's module may have parts of transformers
            found = named_outputs(self.model(**inputs))
        return {name: each.float() if each.is_floating_point() else each for name, each in found.items()}


def survey_module(checkpoint: ModuleInMemory) -> survey.Survey:
    """Survey of the module. Raises UnsupportedModelError, one line, where it does not run on shapes alone."""
    inputs, name, length = checkpoint.inputs, checkpoint.name, checkpoint.length
    with survey.refused(checkpoint, name), plainly():
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        model = survey.faked(checkpoint.module, fake)
        signature = Signature(inputs, ())
        module = PlainModule(model, signature, length)
        lengths = length, length
        if any("sequence" in spec.dims for spec in inputs):
            least, longest, other = _lengths(module, fake, inputs, length)
            signature = replace(signature, max_sequence=longest, min_sequence=least)
            lengths = (length, other)
        outputs, lost = survey.output_specs(module, fake, signature, False, lengths)
        if not outputs:
            raise ExportError(f"returns no float tensors with the batch in front, but {', '.join(lost) or 'none'}")
    said = f"outputs that engines do not have (not of float rows): {', '.join(lost)}" if lost else None
    signature = replace(signature, outputs=outputs, left_out=said)
    module = PlainModule(model, signature, length)
    weighted = sum(any(True for _ in part.parameters(False)) for part in model.modules())
    depth = max(1, weighted // _WEIGHTED_PER_LAYER)
    with plainly():
        axes = survey.axes_of(checkpoint, module, fake, signature, length)
    return survey.Survey(module, fake, survey.shapes_of(model), signature, depth, axes)


def _lengths(
    module: PlainModule, fake: FakeTensorMode, inputs: Sequence[TensorSpec], length: int
) -> tuple[int, int, int]:
    """The least sequence that passes run on; the longest, if that is less than ``_SEARCHED``; and another than
    ``length`` on which they do, as far from it as may be, since what has a share of the steps, as behind a stride, must
    differ too."""

    def runs(length: int) -> bool:
        try:
            with fake, torch.no_grad():
                module.answer(survey.fake_inputs(fake, inputs, Bucket(2, length)))
        except Exception:  # noqa: BLE001  (of any kind: the user's code)
            return False
        return True

    def last(beyond: int) -> int:
        """The last length from ``length`` on towards ``beyond``, where passes fail, on which they run."""
        good = length
        while abs(beyond - good) > 1:
            middle = (good + beyond) // 2
            good, beyond = (middle, beyond) if runs(middle) else (good, middle)
        return good

    least = 1 if runs(1) else last(0)
    most = max(_SEARCHED, 2 * length + 1)
    if runs(most):
        return least, MAX_TOKENS, 2 * length + 1
    longest = last(most)
    others = (longest, max(least, length // 2), length - 1)
    return least, longest, next((other for other in others if 0 < other != length and runs(other)), length)


def without_whole_parameters(module: torch.nn.Module) -> torch.nn.Module:
    """``module`` itself, or where it has parameters of whole numbers, which no training moves, a copy on the same
    tensors with buffers in their place."""

    def is_whole(tensor: torch.Tensor) -> bool:
        return not tensor.is_floating_point() and not tensor.is_complex()

    if not any(map(is_whole, module.parameters())):
        return module
    own = copy.deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})
    for part in own.modules():
        for name, tensor in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if is_whole(tensor):
                delattr(part, name)
                part.register_buffer(name, tensor.detach())
    return own


def copied(module: torch.nn.Module) -> torch.nn.Module:
    """A copy on the processor, in eval mode and float32. Raises CheckpointError for one that cannot be copied."""
    name = type(module).__name__
    with library_errors(lambda said: CheckpointError(f"model: {name} cannot be copied: {said}")):
        return copy.deepcopy(module).cpu().float().eval().requires_grad_(False)


def load_module(checkpoint: ModuleInMemory, signature: Signature, parted: Mapping[str, int]) -> PlainModule:
    """``copied``, in parts. Raises CheckpointError also for parameters that are not finite or no floats."""
    name, model = checkpoint.name, copied(checkpoint.module)
    for parameter_name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise CheckpointError(f"model: parameter {parameter_name} of {name} is {dtype}; expected floats")
        if not is_finite(parameter):
            raise checkpoint.not_finite(parameter_name)
    part_layers(model, parted)
    return PlainModule(model, signature, checkpoint.length)
