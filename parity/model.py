"""MODEL, the side that is right: a module of PyTorch, or another export where there is none.

A pass in float64 takes weights widened in a copy; where the copy would not fit in memory, each is widened as it is used
(what depends on a weight is float64 either way, see compiler/parity/reference.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from ..compiler.parity.reference import in_float64, nudged, widened
from ..errors import CheckpointError
from ..exporters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..exporters.checkpoints.config import offline_transformers
from ..exporters.hugging_face.interface import Loading
from ..exporters.hugging_face.transformers_model import load_transformers
from ..exporters.sentence_transformers.head import SentenceHead, load_head
from ..exporters.sentence_transformers.read_modules import read_modules
from ..exporters.source import open_source
from ..runtime.inputs.arrays import Array, Arrays
from .export import Export, Port, open_exports

Named = dict[str, torch.Tensor]
# The attribute under which wrappers hold a module.
WRAPPER = "model."
# Tokens that any vocabulary has, of a reference that does not say how many it has.
_FEW_TOKENS = 64
_SPARE = 2.0  # times the float64 copy that must be free in memory


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

    def answer(self, feeds: Arrays, module: torch.nn.Module | None = None) -> dict[str, Array]:
        """Outputs of a pass in float32, of ``module`` in the place of its own."""
        with torch.no_grad():
            return _arrays(self.call(module or self.module, _tensors(feeds)))

    @contextmanager
    def wide(self) -> Iterator[Wide]:
        """Passes in float64; the copy of weights lives as long as this."""
        size = sum(parameter.nbytes for parameter in self.module.parameters())
        fits = psutil.virtual_memory().available > _SPARE * 2 * size
        module = widened(self.module) if fits else self.module
        yield Wide(self, module)

    def wide_answer(self, feeds: Arrays, module: torch.nn.Module) -> dict[str, Array]:
        """Outputs in float64 of ``module``, whose weights are widened or are as they are used."""
        hooks = [
            part.register_forward_hook(lambda _m, _i, found: found.double())
            for part in module.modules()
            if isinstance(part, torch.nn.Embedding) and part.weight.dtype == torch.float32
        ]
        tensors = {
            name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in _tensors(feeds).items()
        }
        try:
            with in_float64():
                return _arrays(self.call(module, tensors))
        finally:
            for hook in hooks:
                hook.remove()

    def part(self, name: str) -> torch.nn.Module | None:
        """The module of this name, which leaves the wrapper's own part out."""
        path = name if name.startswith("sentence_head") else f"{WRAPPER}{name}"
        return dict(self.module.named_modules()).get(path)

    def nudged(self, seed: int) -> torch.nn.Module:
        """Its module with an eighth of the weights moved by one rounding."""
        return nudged(self.module, seed)


@dataclass(frozen=True)
class Wide:
    """Passes of ``model`` in float64 by its ``module``, whose weights are widened or are as they are used."""

    model: Model
    module: torch.nn.Module

    def __call__(self, feeds: Arrays) -> dict[str, Array]:
        return self.model.wide_answer(feeds, self.module)


def _tensors(feeds: Arrays) -> Named:
    numbers = {name: array for name, array in feeds.items() if array.dtype != object}  # texts are for servers
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in numbers.items()}


def _arrays(found: Named) -> dict[str, Array]:
    return {name: tensor.detach().numpy() for name, tensor in found.items() if tensor.is_floating_point()}


def open_model(model: Path | str | torch.nn.Module) -> Model:
    """MODEL in PyTorch. Raises CheckpointError or InputError."""
    if isinstance(model, torch.nn.Module):
        return of_module(model)
    if Path(model).suffix in (".onnx", ".xml"):
        return _of_export(open_exports(model)[0])
    return _of_folder(open_checkpoint(Path(model)))


def of_module(module: torch.nn.Module) -> Model:
    """A module of the user's, on the processor and in float32."""
    names = _inputs_of(module)
    config: Any = getattr(module, "config", None)
    facts = _facts(config.to_dict()) if hasattr(config, "to_dict") else _facts_of(module)
    return Model(type(module).__name__, Wrapped(module.eval().float()), names, Wrapped.call, facts)


def _inputs_of(module: torch.nn.Module) -> tuple[str, ...]:
    """The tensors that it takes, by name; of a model of transformers without its switches."""
    taken = inspect.signature(module.forward).parameters.values()
    switches = ("use_cache", "return_dict", "past_key_values", "labels", "logits_to_keep")
    named = [each.name for each in taken if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    return tuple(name for name in named if name not in switches and not name.startswith("output_"))


class ExportModule(torch.nn.Module):
    """Another export as the reference; it computes in its own precision, whatever is asked of a module."""

    def __init__(self, export: Export) -> None:
        super().__init__()
        self._export = [export]

    def __deepcopy__(self, _: dict[int, Any]) -> ExportModule:
        return self

    def call(self, given: Named) -> Named:
        """Outputs by name."""
        export = self._export[0]
        types = {port.name: port.dtype for port in export.inputs}
        found = export.run({name: tensor.numpy().astype(types[name]) for name, tensor in given.items()})
        return {name: torch.from_numpy(array) for name, array in found.items()}


def _of_export(export: Export) -> Model:
    names = tuple(port.name for port in export.inputs)
    return Model(
        export.label, ExportModule(export), names, ExportModule.call, Facts(vocabulary=_FEW_TOKENS), export.files
    )


class Wrapped(torch.nn.Module):
    """A module under the attribute ``model``, as every model here has it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def call(self, given: Named) -> Named:
        """A pass on inputs by name."""
        return named(self.model(**given))

    forward = call


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
    transformers = offline_transformers()
    stated = checkpoint.config
    if stated.get("auto_map") and stated.get("model_type") not in transformers.models.auto.CONFIG_MAPPING:
        raise CheckpointError(
            f"{checkpoint.folder}: needs code that the folder brings (auto_map), which is never run; give the loaded "
            "module to nestforge.check_parity"
        )
    if stated.get("model_type") not in transformers.models.auto.CONFIG_MAPPING:
        return _of_ours(checkpoint)
    has_pooler = any(".pooler." in f".{name}" for name in checkpoint.tensors)
    module: Any = load_transformers(checkpoint, Loading(without_pooler=not has_pooler))
    modules = read_modules(checkpoint, module.config.hidden_size) if checkpoint.has_modules else None
    head = load_head(checkpoint.folder, modules)
    whole = Transformer(module, head)
    names = _inputs_of(module)
    facts = _facts(module.config.to_dict())
    files = (*checkpoint.source_files(), *(modules.files if modules else ()))
    return Model(str(checkpoint.folder), whole, names, Transformer.call, facts, files, checkpoint.folder)


def _of_ours(checkpoint: Checkpoint) -> Model:
    """A checkpoint in a format of nestforge's own. Raises UnsupportedModelError for one of nobody's."""
    source = open_source(checkpoint.folder)
    given, returned = source.signature.inputs, [spec.name for spec in source.signature.outputs]
    high = max((spec.high for spec in given if spec.high is not None), default=None)
    facts = Facts(high, None, source.signature.max_sequence, depth=source.spec.depth)

    def call(module: torch.nn.Module, feeds: Named) -> Named:
        return named(module(*(feeds[spec.name] for spec in given)), returned)

    module = source.architecture.load().eval()
    names, files = tuple(spec.name for spec in given), tuple(checkpoint.source_files())
    return Model(str(checkpoint.folder), module, names, call, facts, files, checkpoint.folder)


class Transformer(torch.nn.Module):
    """A model of transformers, its base model's last hidden state beside its own outputs, and the sentence embedding
    where the folder is one of sentence-transformers."""

    def __init__(self, model: torch.nn.Module, head: SentenceHead | None) -> None:
        super().__init__()
        self.model, self.sentence_head = model, head

    def call(self, given: Named) -> Named:
        """A pass on inputs by name."""
        model: Any = self.model
        base, seen = getattr(model, "base_model", model), dict[str, Any]()
        hook = base.register_forward_hook(lambda _m, _i, found: seen.update(found))
        try:
            found = dict(model(**given, return_dict=True))
        finally:
            hook.remove()
        hidden = seen.get("last_hidden_state")
        tensors = named(found if hidden is None else {"last_hidden_state": hidden, **found})
        if self.sentence_head is not None:
            assert hidden is not None
            mask = given.get("attention_mask")
            if mask is None:
                mask = torch.ones(hidden.shape[:2], dtype=torch.int64)
            tensors["token_embeddings"], tensors["sentence_embedding"] = self.sentence_head(hidden, mask)
        return tensors

    forward = call


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
