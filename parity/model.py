"""MODEL, the side that is right: a module of PyTorch, or another export where there is none.

A pass in float64 makes no copy of the weights: each is widened as it is used (compiler/parity/reading.py).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..bundle.open_bundle import open_bundle
from ..compiler.graph.store import recover_order
from ..compiler.job import stated_source
from ..compiler.parity.reading import in_float64, inputs_of
from ..errors import CheckpointError, InputError
from ..exporters.checkpoints.checkpoint import Checkpoint
from ..exporters.checkpoints.config import offline_transformers
from ..exporters.checkpoints.hub import open_named
from ..exporters.hugging_face.interface import POOLING_MASK, Loading
from ..exporters.hugging_face.transformers_model import load_transformers
from ..exporters.sentence_transformers.head import SentenceHead, load_head
from ..exporters.sentence_transformers.read_modules import read_modules
from ..exporters.source import ModelSource, open_source
from ..exporters.universal import UniversalModel, load_universal, permute_axis
from ..runtime.inputs.arrays import Array, Arrays
from .export import Export, Port
from .exports import open_exports

Named = dict[str, torch.Tensor]
# The attribute under which wrappers hold a module.
WRAPPER = "model."
# Tokens that any vocabulary has, of a reference that does not say how many it has.
_FEW_TOKENS = 64
_SWITCHES = ("use_cache", "return_dict", "past_key_values", "labels", "logits_to_keep")


@dataclass(frozen=True)
class Facts:
    """Bounds of inputs: tokens, types of tokens, positions, and the ``image`` ``[C, H, W]`` that it takes."""

    vocabulary: int | None = None
    types: int | None = None
    positions: int | None = None
    image: tuple[int, int, int] | None = None
    depth: int = 1
    pad: int = 0


@dataclass
class Model:
    """A ``module`` in float32 that takes ``inputs`` by name. ``call`` makes a pass of it and names what it returns."""

    label: str
    module: torch.nn.Module
    inputs: tuple[str, ...]
    call: Callable[[Any, Named], Named]
    facts: Facts = field(default_factory=Facts)
    files: tuple[Path, ...] = ()
    folder: Path | None = None
    # Inputs that it takes and an export may leave out.
    needs: tuple[Port, ...] = ()

    def answer(self, feeds: Arrays) -> dict[str, Array]:
        """Outputs of a pass, which reads weights as the context around it says (compiler/parity/reading.py)."""
        with torch.no_grad():
            found = self.tensors(feeds)
        return {name: tensor.detach().numpy() for name, tensor in found.items() if tensor.is_floating_point()}

    def tensors(self, feeds: Arrays) -> Named:
        """The same as tensors, with their gradients where those are wanted."""
        numbers = {name: array for name, array in feeds.items() if array.dtype != object}  # texts are for servers
        return self.call(self.module, dict(zip(numbers, inputs_of(numbers), strict=True)))

    def wide_answer(self, feeds: Arrays) -> dict[str, Array]:
        """Outputs of a pass in float64."""
        with in_float64(self.module):
            return self.answer(feeds)

    def part(self, name: str) -> torch.nn.Module | None:
        """The module of this name, which leaves the wrapper's own part out."""
        path = name if name.startswith("sentence_head") else f"{WRAPPER}{name}"
        return dict(self.module.named_modules()).get(path)


def open_model(model: Any) -> Model:
    """MODEL in PyTorch. Raises CheckpointError or InputError."""
    if isinstance(model, torch.nn.Module):
        return _of_module(model)
    if not isinstance(model, str | Path):
        raise InputError(f"against: expected a folder, an export or a torch.nn.Module, got {type(model).__name__}")
    if Path(model).suffix in (".onnx", ".xml"):
        export = open_exports(model)[0]
        names, facts = tuple(port.name for port in export.inputs), Facts(vocabulary=_FEW_TOKENS)
        return Model(export.label, ExportModule(export), names, ExportModule.call, facts, export.files)
    checkpoint = open_named(model)
    checkpoint.require_weights()
    return _of_folder(checkpoint)


def _of_module(module: torch.nn.Module) -> Model:
    """A module of the user's, on the processor and in float32."""
    config: Any = getattr(module, "config", None)
    facts = _facts(config.to_dict()) if hasattr(config, "to_dict") else _facts_of(module)
    names = _inputs_of(module)
    return Model(type(module).__name__, Wrapped(module.eval().float()), names, Wrapped.call, facts)


def _inputs_of(module: torch.nn.Module) -> tuple[str, ...]:
    """The tensors that it takes, by name; of a model of transformers without its switches."""
    taken = inspect.signature(module.forward).parameters.values()
    named = [each.name for each in taken if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    return tuple(name for name in named if name not in _SWITCHES and not name.startswith("output_"))


class Wrapped(torch.nn.Module):
    """A module under the attribute ``model``, as every model here has it: its outputs by name, beside them the last
    hidden state of the model within a model of transformers, and the sentence embedding where there is a ``head``."""

    def __init__(self, model: torch.nn.Module, head: SentenceHead | None = None) -> None:
        super().__init__()
        self.model, self.sentence_head = model, head

    def call(self, given: Named) -> Named:
        """A pass on inputs by name."""
        given = dict(given)
        pooled = given.pop(POOLING_MASK, None)
        base: Any = getattr(self.model, "base_model", self.model)
        seen: dict[str, Any] = {}
        hook = base.register_forward_hook(lambda _m, _i, found: seen.update(found) if _is_named(found) else None)
        try:
            found = self.model(**given)
        finally:
            hook.remove()
        hidden = seen.get("last_hidden_state")
        tensors = named({"last_hidden_state": hidden, **found} if hidden is not None and _is_named(found) else found)
        if self.sentence_head is not None:
            assert hidden is not None
            mask = given.get("attention_mask")
            mask = torch.ones(hidden.shape[:2], dtype=torch.int64) if mask is None else mask
            tensors["token_embeddings"], tensors["sentence_embedding"] = self.sentence_head(hidden, mask, pooled)
        return tensors

    forward = call


def _is_named(found: Any) -> bool:
    return isinstance(found, Mapping)


class ExportModule(torch.nn.Module):
    """Another export as the reference; it computes in its own precision, whatever is asked of a module."""

    def __init__(self, export: Export) -> None:
        super().__init__()
        self._export = [export]

    def call(self, given: Named) -> Named:
        """Outputs by name."""
        export = self._export[0]
        types = {port.name: port.dtype for port in export.inputs}
        found = export.run({name: tensor.numpy().astype(types[name]) for name, tensor in given.items()})
        return {name: torch.from_numpy(array) for name, array in found.items()}


def named(found: Any, outputs: Sequence[str] = ()) -> Named:
    """The outputs of a module, by name: the keys of a mapping, ``outputs``, or ``output_0`` and so on; a cache is
    ``present.0.key``, ``present.0.value`` and so on."""
    if isinstance(found, torch.Tensor):
        found = (found,)
    if not isinstance(found, Mapping):
        found = {outputs[n] if n < len(outputs) else f"output_{n}": each for n, each in enumerate(found)}
    tensors: Named = {}
    for name, each in found.items():
        if isinstance(each, torch.Tensor):
            tensors[name] = each
        elif name == "past_key_values" and each is not None:
            tensors |= _cache(each)
        elif isinstance(each, tuple) and each and all(isinstance(one, torch.Tensor) for one in each):
            tensors |= {f"{name}.{number}": one for number, one in enumerate(each)}
    return tensors


def _cache(cache: Any) -> Named:
    own, across = getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", None)
    found: Named = {}
    kinds = {"": own} if across is None else {"decoder.": own, "encoder.": across}
    for kind, part in kinds.items():
        for number, layer in enumerate(part.layers):
            if layer.keys is not None:
                found[f"present.{number}.{kind}key"], found[f"present.{number}.{kind}value"] = layer.keys, layer.values
    return found


def _of_folder(checkpoint: Checkpoint) -> Model:
    stated = checkpoint.config
    if stated.get("model_type") not in offline_transformers().models.auto.CONFIG_MAPPING:
        if stated.get("auto_map"):
            raise CheckpointError(
                f"{checkpoint.folder}: needs code that the folder brings (auto_map), which is never run; give the "
                "loaded module to nestforge.check_parity"
            )
        source = open_source(checkpoint.folder)
        return _of_source(source, source.architecture.load())
    has_pooler = any(".pooler." in f".{name}" for name in checkpoint.tensors)
    module: Any = load_transformers(checkpoint, Loading(without_pooler=not has_pooler))
    modules = read_modules(checkpoint, module.config.hidden_size) if checkpoint.has_modules else None
    whole = Wrapped(module, load_head(checkpoint.folder, modules))
    facts, files = _facts(module.config.to_dict()), (*checkpoint.source_files(), *(modules.files if modules else ()))
    names = (*_inputs_of(module), *([POOLING_MASK] if modules is not None and modules.leaves_prompt_out else []))
    return Model(str(checkpoint.folder), whole, names, Wrapped.call, facts, files, checkpoint.folder)


def _of_source(source: ModelSource, module: torch.nn.Module) -> Model:
    """A ``module`` that nestforge itself loaded."""
    given, returned = source.signature.inputs, [spec.name for spec in source.signature.outputs]
    high = max((spec.high for spec in given if spec.high is not None), default=None)
    facts = Facts(high, None, source.signature.max_sequence, depth=source.spec.depth)

    def call(module: torch.nn.Module, feeds: Named) -> Named:
        return named(module(*(feeds[spec.name] for spec in given)), returned)

    names, files = tuple(spec.name for spec in given), tuple(source.checkpoint.source_files())
    return Model(str(source.checkpoint.folder), module.eval(), names, call, facts, files, source.checkpoint.folder)


def universal_of(model: Model, bundle: Path) -> UniversalModel:
    """The model with its neurons and heads in the order of the bundle in this folder. Raises CheckpointError for a
    bundle that was made of another, InputError for a model that no folder holds."""
    if model.folder is None:
        raise InputError(f"{bundle}: its smaller submodels are compared with slices of the model's folder; give that")
    opened = open_bundle(bundle)
    universal = load_universal(stated_source(model.folder, opened.manifest))
    for axis, order in recover_order(opened.weights, universal).items():
        permute_axis(universal, axis, order)
    return universal


def submodel_of(universal: UniversalModel, submodel: str) -> Model:
    return _of_source(universal.source, universal.narrow(universal.spec.parse(submodel)))


def _facts(config: Mapping[str, Any]) -> Facts:
    """Bounds of inputs from ``config.json``, of a text model inside a larger one where it has its own part."""
    for part in ("text_config", "decoder", "vision_config"):
        if isinstance(config.get(part), Mapping) and "hidden_size" not in config:
            config = {**config[part], **config}

    def number(*keys: str) -> int | None:
        return next((config[key] for key in keys if type(config.get(key)) is int and config[key] > 0), None)

    size = config.get("image_size")
    sides = size if isinstance(size, (list, tuple)) else (size, size)
    image = (number("num_channels") or 3, *sides) if isinstance(sides[0], int) else None
    return Facts(
        number("vocab_size"),
        number("type_vocab_size"),
        number("max_position_embeddings", "n_positions", "n_ctx"),
        image,
        number("num_hidden_layers", "n_layer", "num_layers") or 1,
        number("pad_token_id") or 0,
    )


def _facts_of(module: torch.nn.Module) -> Facts:
    tables = [part.num_embeddings for part in module.modules() if isinstance(part, torch.nn.Embedding)]
    weighted = sum(isinstance(part, (torch.nn.Linear, torch.nn.Conv2d)) for part in module.modules())
    return Facts(vocabulary=min(tables, default=2), depth=max(1, weighted // 6))
