"""Loads the user's own transformers module, strictly, and gives it a positional signature for tracing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from safetensors import safe_open

from ...errors import CheckpointError
from ...progress import Bytes, tell
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import offline_transformers
from ..checkpoints.own_folder import is_finite
from ..modules.layers import linear_on, mend_sizes
from ..sentence_transformers.head import SentenceHead, load_head
from ..sentence_transformers.modules import TOKENS
from ..sentence_transformers.read_modules import SentenceModules
from ..signature import Signature
from ..torch_internals import put_first
from .distances import look_up_distances
from .interface import EMBEDDING, HIDDEN, POOLING_MASK, Loading
from .passes import go_in_order, nothing_left, without_asserts
from .tensors import Shape
from .transformers_internals import set_experts

# In transformers' masking_utils: finds where the next of several sequences in one row begins.
_SEARCH = "find_packed_sequence_indices"
# In its pytorch_utils: what tells whether results of functions are kept.
_CACHES_ASK = "is_torchdynamo_compiling"


class TransformersModule(torch.nn.Module):
    """Calls ``model`` by keyword and returns its outputs as a tuple, in the signature's order.

    ``head`` makes the sentence embedding of the last hidden state; the functions of ``loading`` change what goes in and
    what comes out.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        signature: Signature,
        head: SentenceHead | None = None,
        loading: Loading | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.inputs = tuple(spec.name for spec in signature.inputs)
        self.outputs = tuple(spec.name for spec in signature.outputs)
        self.mask = signature.mask
        self.sentence_head = head
        self.given, self.found = (loading.given, loading.found) if loading else (None, None)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = self.answer(dict(zip(self.inputs, tensors, strict=True)))
        return tuple(result[name] for name in self.outputs)

    def answer(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Everything that the model returns, by name, and the sentence embedding if there is one."""
        own = {name: tensor for name, tensor in inputs.items() if name != POOLING_MASK}
        if self.given is not None:
            own = self.given(own)
        one = one_sequence_a_row() if torch.compiler.is_exporting() else nullcontext()
        with one, nothing_left(self.model), without_asserts(self.model):
            result = dict(self.model(**own))
        if self.found is not None:
            result |= self.found(result)
        if self.sentence_head is not None:
            assert self.mask is not None
            pooled = inputs.get(POOLING_MASK)
            result[TOKENS], result[EMBEDDING] = self.sentence_head(result[HIDDEN], inputs[self.mask], pooled)
        return result


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Within it there is no search for several sequences in a row, which transformers leaves out once it has seen that
    the positions rise by one, as they always do here; an export cannot see values, and would keep it."""
    from transformers import masking_utils

    search = getattr(masking_utils, _SEARCH)
    setattr(masking_utils, _SEARCH, lambda _: None)
    try:
        yield
    finally:
        setattr(masking_utils, _SEARCH, search)


@contextmanager
def caches_unused() -> Iterator[None]:
    """Within it transformers' own caches of functions are passed by, as in an export: what a pass without numbers left
    there would be taken for numbers by the next."""
    from transformers import pytorch_utils

    asked = vars(pytorch_utils)[_CACHES_ASK]
    setattr(pytorch_utils, _CACHES_ASK, lambda: True)
    try:
        yield
    finally:
        setattr(pytorch_utils, _CACHES_ASK, asked)


def load_module(
    checkpoint: Checkpoint, signature: Signature, modules: SentenceModules | None, loading: Loading
) -> TransformersModule:
    """The module that takes the inputs of ``signature`` and returns its outputs (float32).

    Raises CheckpointError if there are no weights, or one is missing, has another shape or is not finite.
    """
    model = load_transformers(checkpoint, loading)
    if loading.finish is not None:
        loading.finish(model)
    return TransformersModule(model, signature, load_head(checkpoint.folder, modules), loading)


def load_transformers(checkpoint: Checkpoint, loading: Loading) -> torch.nn.Module:
    """The class that ``config.json`` or ``loading`` names, with this checkpoint's weights, in eval mode and float32.

    Where ``config.json`` lists widths per layer, which transformers' own classes do not know, the module is made with
    the largest of them and resized before weights are loaded. Raises CheckpointError as ``load_module`` does.
    """
    checkpoint.require_weights()
    config, cls, options = class_of(checkpoint, loading)
    try:
        with _unread(checkpoint) as tensors:
            model, report = cls.from_pretrained(
                None,
                state_dict=tensors,
                config=config,
                local_files_only=True,
                trust_remote_code=False,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
    except Exception as failure:  # as above
        raise _unloadable(checkpoint, failure) from failure
    _refuse_misfits(checkpoint, report, model if loading.surveyed else None)
    settle(model, loading)
    parameters = dict(model.named_parameters())
    read, total = 0, sum(parameter.nbytes for parameter in parameters.values())
    for parameter_name, parameter in parameters.items():
        tell(Bytes(read), Bytes(total))  # what is mapped is read here
        read += parameter.nbytes
        if parameter.dtype != torch.float32:
            raise CheckpointError(
                f"{checkpoint.folder}: parameter {parameter_name} of {type(model).__name__} stays "
                f"{str(parameter.dtype).removeprefix('torch.')}; expected a model that can be loaded in float32"
            )
        if not is_finite(parameter):
            raise checkpoint.not_finite(parameter_name)
    frozen: torch.nn.Module = model.eval().requires_grad_(False)
    return frozen


def class_of(checkpoint: Checkpoint, loading: Loading) -> tuple[Any, Any, dict[str, bool]]:
    """The configuration, the class and what it is made with beside. Raises CheckpointError as ``load_module`` does."""
    transformers = offline_transformers()
    name, widths = loading.class_name or checkpoint.architecture, loading.widths
    named = getattr(transformers, name or "PreTrainedModel", None)
    if not (isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)):
        raise CheckpointError(f"{checkpoint.folder / 'config.json'}: transformers has no class {name!r:.80}")
    try:
        listed = checkpoint.config.get(widths)
        resized = loading.shapes if isinstance(listed, list) else None
        if resized is not None:
            assert isinstance(listed, list)
            config = transformers.AutoConfig.for_model(**{**checkpoint.config, widths: max(listed)})
        else:
            # It reads its own part of a folder of several media, and a class of one of them has that alone.
            known = transformers.CONFIG_MAPPING[checkpoint.config["model_type"]]
            own: Any = getattr(named, "config_class", None)
            known = own if own in known.sub_configs.values() else known
            config = known.from_pretrained(checkpoint.folder, local_files_only=True)
        config.return_dict = True  # outputs are read by their names
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            if part is not None:
                part.use_cache = False  # one pass, whose keys and values nobody asks for
        config.chunk_size_feed_forward = 0  # memory saved by computing the same in pieces
        if loading.surveyed:  # no graph has loops over the experts that tokens chose
            set_experts(config, "batched_mm")
        cls: Any = transformers.MODEL_MAPPING[type(config)] if name is None else named
        cls = cls[0] if isinstance(cls, tuple) else cls
        has_pooler = "add_pooling_layer" in inspect.signature(cls.__init__).parameters
        options = {"add_pooling_layer": False} if loading.without_pooler and has_pooler else {}
        return config, cls if resized is None else _resized(cls, resized), options
    except Exception as failure:  # transformers raises many unrelated types for a config.json that makes no sense
        raise _unloadable(checkpoint, failure) from failure


def _unloadable(checkpoint: Checkpoint, failure: Exception) -> CheckpointError:
    return CheckpointError(f"{checkpoint.folder}: transformers cannot load it ({_one_line(failure)})")


@contextmanager
def _unread(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    """Every tensor of the files, read where it is sliced: float32 stays mapped, and of what is to be widened no page is
    left in memory, as it would be of files that transformers opens."""
    with ExitStack() as stack:
        files: dict[tuple[str, str], Any] = {}
        found = {}
        for name, header in checkpoint.tensors.items():
            backend = "mmap" if header.dtype == "F32" else "pread"
            if (header.file, backend) not in files:
                opened = safe_open(checkpoint.folder / header.file, framework="pt", backend=backend)
                files[header.file, backend] = stack.enter_context(opened)
            found[name] = files[header.file, backend].get_slice(name)
        yield found


def _resized(cls: Any, shapes: Mapping[str, Shape]) -> Any:
    """``cls`` whose new modules have parameters of ``shapes``. It keeps its name: by it transformers finds how weights
    were renamed."""

    def init(self: torch.nn.Module, *args: Any, **options: Any) -> None:
        cls.__init__(self, *args, **options)
        for name, parameter in list(self.named_parameters()):
            if tuple(parameter.shape) != shapes.get(name, tuple(parameter.shape)):
                owner, _, own = name.rpartition(".")
                setattr(self.get_submodule(owner), own, torch.nn.Parameter(torch.empty(shapes[name])))
        mend_sizes(self)

    return type(cls.__name__, (cls,), {"__init__": init, "__module__": cls.__module__})


def settle(model: Any, loading: Loading) -> None:
    """Makes a class that was made or loaded ready to be read. A tied parameter has the first of its names: some
    classes make their head first, and would name the embedding after it. T5's kin tie a head that equals the table of
    tokens, also of a model that is not, and compute buckets of distances by a logarithm."""
    put_first(model, model.base_model_prefix)
    head = model.get_output_embeddings() if loading.untied else None
    if head is not None and head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    look_up_distances(model)
    go_in_order(model)


def _refuse_misfits(checkpoint: Checkpoint, report: Mapping[str, Any], surveyed: Any) -> None:
    """No tensor of a ``surveyed`` model is passed over, but what modules of sentence-transformers do without: heads and
    poolers, which lie outside the base model; and what a class of one medium does without: parts that read others."""
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {name} has shape {list(found)}; config.json says {list(expected)}"
        )
    for name in sorted(report["missing_keys"]):
        raise CheckpointError(f"{checkpoint.folder}: tensor {name} is missing from the weights")
    for name in sorted(report["unexpected_keys"]) if surveyed is not None else ():
        own = name.removeprefix(f"{surveyed.base_model_prefix}.")
        part = own.partition(".")[0]
        inside = part in dict(surveyed.named_children()) or (own != name and part != "pooler")
        is_part = surveyed.config.model_type != checkpoint.config.get("model_type")
        if inside or not (checkpoint.has_modules or is_part):
            raise checkpoint.has_no_place(name)


def _one_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:300]


class SplitFfn(torch.nn.Module):
    """The FFN of a decoder with a layer each for gate and up, so that a prefix of neurons is a prefix of every weight.

    It is made of ``packed``, whose ``gate_up_proj`` makes the gate before up; on the same weights, without biases."""

    def __init__(self, packed: Any) -> None:
        super().__init__()
        gate, up = packed.gate_up_proj.weight.chunk(2)
        self.gate_proj, self.up_proj = linear_on(gate), linear_on(up)
        self.down_proj = packed.down_proj
        self.activation = packed.activation_fn

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [B, S, H] to [B, S, H]."""
        found: torch.Tensor = self.down_proj(self.up_proj(hidden) * self.activation(self.gate_proj(hidden)))
        return found
