"""Inputs that find faults, by a stated rule and a seed; and texts as cases, by the model's own tokenizer, behind its
default prompt.

A model that reads tokens: each of the lengths 1, 2, 5, the traced one, 16, 33 and the longest (what the model has
positions for; at most 2048, and beyond 512 only where weights times tokens stay below 2^34), in batches of one to
three; rows padded on the right, on the left and inside; the first and last tokens of the vocabulary, those whose rows
the export stores otherwise, one token repeated, other types of tokens. One that reads numbers: normal and uniform
ones, zeros, values at the ends of what is legal, one impulse. A size that the export declares fixed stays.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ..compiler.parity.cases import Case
from ..compiler.parity.compare import counted
from ..errors import CheckpointError, InputError
from ..exporters.checkpoints.config import offline_transformers
from ..exporters.depth import layer_list
from ..exporters.sentence_transformers.library import Library, is_installed
from ..exporters.sentence_transformers.text_settings import read_model_config
from ..exporters.source import open_source
from ..outside import library_errors
from ..outside_file import read_json
from ..profiles.precision import PRECISIONS
from ..runtime.inputs.arrays import Array
from .export import PAST, Export, Match, Port
from .exports import PROMPT_NAME, TEXTS, BundleTexts
from .model import Facts, Model, Wrapped

_USUAL, _LONGEST = 512, 2048
_MOST_PRODUCTS = 2**34  # weights times tokens
_TRACED = 64
IDS, MASK, TYPES, POSITIONS = "input_ids", "attention_mask", "token_type_ids", "position_ids"
DECODER_IDS = "decoder_input_ids"
_EXTREME = 6.0  # standard deviations of a normalised image or spectrum


@dataclass(frozen=True)
class Trial(Case):
    """A case and what is particular about it, by which faults are told apart."""

    traits: frozenset[str] = frozenset()
    # Tokens of each piece in which a decoder with a cache reads it; none: at once.
    pieces: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Its tokens in a row."""
        arrays = list(self.feeds.values())
        ids = next((array for name, array in self.feeds.items() if name.endswith(IDS)), arrays[0])
        return int(ids.shape[1]) if ids.ndim > 1 else int(ids.size)

    def hides(self, name: str) -> bool:
        """Whether its mask says something of an output or module of this name, which it does not of what a decoder
        answers behind an encoder."""
        return MASK in self.feeds and (DECODER_IDS not in self.feeds or ("encoder" in name and "decoder" not in name))

    def counted(self, array: Array, name: str = "") -> Array:
        """``array``, of an output or module of this name, with 0 at positions ``[B, S]`` that the mask leaves out."""
        is_hidden = self.hides(name) and array.shape[:2] == self.feeds[MASK].shape
        return counted(array, self.feeds[MASK]) if is_hidden else array


class Shape(NamedTuple):
    """One case to be: its name, rows, length, which places are hidden (``right``, ``left``, ``inside`` or none), its
    tokens and types."""

    name: str
    rows: int
    length: int
    hidden: str = ""
    tokens: str = "random"
    types: bool = False


def text_shapes(longest: int) -> list[Shape]:
    """The rule for models that read tokens; no longer than ``longest``."""
    size, long = min(16, longest), min(33, longest)
    return [
        *(Shape(f"length {n}", 1, n) for n in (1, 2, 5) if n <= longest),
        Shape(f"3 rows of {size}", 3, size),
        *(Shape(f"3 rows of {size} padded {side}", 3, size, side) for side in ("right", "left")),
        Shape(f"2 rows of {size} hidden inside", 2, size, "inside"),
        Shape(f"2 rows of {long}, other types", 2, long, types=True),
        Shape("first and last tokens of the vocabulary", 2, min(8, longest), tokens="edge"),
        Shape("one token repeated", 1, min(7, longest), tokens="same"),
        Shape(f"longest, {longest}", 1, longest),
    ]


def make_cases(export: Export, inputs: Sequence[Match], model: Model, seed: int) -> list[Trial]:
    """The cases of ``export`` by the model's names, always the same for one seed. Where scales were fixed on examples,
    numbers at the ends of what is legal are left out: examples have none."""
    ports = {match.model: port for match in inputs if (port := export.port(match.name)) is not None}
    ports = {port.name: port for port in model.needs} | ports
    if any(PAST.search(port.name) for port in export.inputs):  # a decoder that takes steps of one token is given them
        ports |= {name: replace(port, dims=None) for name, port in ports.items() if name.endswith(IDS)}
    if IDS in ports or any(name.endswith(IDS) for name in ports):
        return _text_cases(ports, model, seed, export)
    found = _number_cases(ports, model.facts, seed)
    is_fixed = PRECISIONS[export.precision].calibration == "scales"
    return [trial for trial in found if not is_fixed or "ends" not in trial.traits]


def of_tokens(trials: Sequence[Trial], tokens: Array) -> Trial:
    """The least case that has room for these tokens, with them."""
    whole = [trial for trial in trials if "padding" not in trial.traits]
    enough = [trial for trial in whole if trial.tokens >= tokens.size] or whole
    chosen = min(enough, key=lambda trial: abs(trial.tokens - tokens.size))
    feeds = {name: np.resize(tokens, a.shape) if name.endswith(IDS) else a for name, a in chosen.feeds.items()}
    return replace(chosen, name="tokens whose rows the export stores otherwise", feeds=feeds)


def traced_sizes(trials: Sequence[Trial]) -> Iterator[Trial]:
    """Sizes at which an export that answers none of ``trials`` may have been traced: up to four rows of the longest
    one, cut to a length."""
    longest = max(trials, key=lambda trial: trial.tokens)
    if IDS not in longest.feeds or longest.pieces or any(array.ndim < 2 for array in longest.feeds.values()):
        return
    most = longest.feeds[IDS].shape[1]
    for length in (*range(1, min(most, _TRACED) + 1), *(2**n for n in range(7, 10) if 2**n <= most)):
        for rows in (1, 2, 3, 4):
            feeds = {name: np.repeat(array[:1, :length], rows, 0) for name, array in longest.feeds.items()}
            yield Trial(f"{rows} rows of {length}", feeds)


def longest_of(model: Model) -> int:
    """Number of the model's positions, where a pass of that length in float64 takes seconds."""
    weights = sum(parameter.numel() for parameter in model.module.parameters())
    affordable = max(_USUAL, min(_LONGEST, _MOST_PRODUCTS // max(1, weights)))
    positions = model.facts.positions or _USUAL
    tables = [part for part in model.module.modules() if isinstance(part, torch.nn.Embedding)]
    # RoBERTa and its kin count positions from behind the one of padding.
    behind = [table.padding_idx + 1 for table in tables if table.num_embeddings == positions and table.padding_idx]
    return min(affordable, positions - max(behind, default=0))


def _text_cases(ports: Mapping[str, Port], model: Model, seed: int, export: Export) -> list[Trial]:
    rows, longest = export.largest or (_LONGEST, _LONGEST)
    found: dict[tuple[object, ...], Trial] = {}
    for number, shape in enumerate(text_shapes(min(longest, longest_of(model)))):
        if shape.hidden and MASK not in ports:
            continue
        shape = shape._replace(rows=min(shape.rows, rows))
        trial = _text_case(shape, ports, model.facts, np.random.default_rng((seed, number)))
        sizes = next(array.shape for name, array in trial.feeds.items() if name.endswith(IDS))
        found.setdefault((sizes, *shape[3:]), trial)  # fixed sizes fall together
    return list(found.values())


def _text_case(shape: Shape, ports: Mapping[str, Port], facts: Facts, rng: np.random.Generator) -> Trial:
    named = next(port for name, port in ports.items() if name.endswith(IDS))
    rows, length = size = _sizes(named, shape.rows, (shape.length,))
    mask = _hidden(shape.hidden, rows, length, rng)
    feeds: dict[str, Array] = {}
    for name, port in ports.items():
        if name == DECODER_IDS:  # what a decoder is given has another length than what its encoder reads
            feeds[name] = _tokens(shape.tokens, _sizes(port, rows, (max(2, length - 1),)), facts, rng)
        elif name.endswith(IDS):
            feeds[name] = _tokens(shape.tokens, size, facts, rng)
        elif name.endswith(MASK):
            feeds[name] = mask
        elif name == TYPES:
            feeds[name] = rng.integers(0, facts.types or 1, size) if shape.types else np.zeros_like(mask)
        elif name == POSITIONS:
            feeds[name] = np.arange(length)[None].repeat(rows, 0)
        else:  # nothing is known of it but its shape
            sizes = _sizes(port, rows, (length,))
            is_float = port.dtype.startswith("float")
            drawn = rng.standard_normal(sizes) if is_float else rng.integers(0, 2, sizes)
            feeds[name] = drawn.astype(np.float32 if is_float else port.dtype)
    traits = {"padding", f"padded {shape.hidden}"} if shape.hidden else set()
    traits |= {"types"} if shape.types and (facts.types or 1) > 1 else set()
    return Trial(shape.name, feeds, traits=frozenset(traits | ({"several rows"} if rows > 1 else set())))


def _sizes(port: Port, rows: int, others: Sequence[int]) -> tuple[int, ...]:
    """Where ``port`` declares no size its own: ``rows``, and ``others``, of which the last one goes on."""
    dims = ("", *("" for _ in others)) if port.dims is None else port.dims
    free = [rows, *others, *[others[-1]] * len(dims)]
    return tuple(dim if isinstance(dim, int) else size for dim, size in zip(dims, free, strict=False))


def _hidden(kind: str, rows: int, length: int, rng: np.random.Generator) -> Array:
    """``[rows, length]`` int64, every row with a token, the later rows with more of them."""
    mask = np.ones((rows, length), np.int64)
    for row in range(rows if length > 1 else 0):
        gone = max(1, length // (2 + 2 * row))
        if kind == "right":
            mask[row, length - gone :] = 0
        elif kind == "left":
            mask[row, :gone] = 0
        elif kind == "inside":
            mask[row, 1 + rng.permutation(length - 2)[: max(1, length // 4)]] = 0
    return mask


def _tokens(kind: str, size: Sequence[int], facts: Facts, rng: np.random.Generator) -> Array:
    most = facts.vocabulary or 2
    if kind == "edge":
        return np.resize(np.array([0, most - 1, 1 % most, max(0, most - 2)], np.int64), size)
    return np.full(size, int(rng.integers(0, most)), np.int64) if kind == "same" else rng.integers(0, most, size)


_NUMBERS: Mapping[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "uniform": lambda rng, size: rng.random(size),
    "zeros": lambda _, size: np.zeros(size),
    "extreme": lambda rng, size: _EXTREME * rng.choice([-1.0, 1.0], size),
    "one impulse": lambda _, size: _EXTREME * (np.arange(prod(size)) == prod(size) // 2).reshape(size),
}


def _number_cases(ports: Mapping[str, Port], facts: Facts, seed: int) -> list[Trial]:
    found: dict[str, Trial] = {}
    for number, (kind, rows) in enumerate([*((kind, 1) for kind in _NUMBERS), ("normal", 2), ("uniform", 3)]):
        rng = np.random.default_rng((seed, number))
        feeds: dict[str, Array] = {}
        for name, port in ports.items():
            known = facts.image if facts.image is not None and len(port.dims or ()) == 4 else (8,)
            sizes = _sizes(port, rows, known) if port.dims is not None else (rows,)
            if port.dtype.startswith("float"):
                feeds[name] = _NUMBERS[kind](rng, sizes).astype(np.float32)
            else:
                feeds[name] = rng.integers(0, facts.vocabulary or 2, sizes).astype(port.dtype)
        traits = {"several rows"} if rows > 1 else {"ends"} if kind in ("extreme", "one impulse") else set()
        name = f"{kind}, {', '.join(map(str, next(iter(feeds.values())).shape))}"
        found[name] = Trial(name, feeds, traits=frozenset(traits))
    return list(found.values())


_ROWS = 8  # texts of one case


def text_trials(model: Model, texts: Sequence[str], for_server: bool = False) -> list[Trial]:
    """``texts`` as cases, cut to what the model takes. A server is given the texts themselves beside the tokens. Raises
    InputError, for a model without a tokenizer too."""
    if not texts:
        return []
    if model.folder is None or not (model.folder / "tokenizer.json").is_file():
        raise InputError(f"{model.label}: has no tokenizer.json, which texts need; give the model's folder with it")
    tokenizer, prompt, most = _tokenizer(model)
    found = []
    for start in range(0, len(texts), _ROWS):
        rows = list(texts[start : start + _ROWS])
        with library_errors(lambda said: InputError(f"{model.label}: its tokenizer does not take the texts ({said})")):
            encoded = [tokenizer(prompt + row, truncation=True, max_length=most)["input_ids"] for row in rows]
        mask = np.array(
            [[place < len(tokens) for place in range(max(map(len, encoded)))] for tokens in encoded], np.int64
        )
        ids = np.full_like(mask, model.facts.pad)
        ids[mask == 1] = np.concatenate(encoded)
        feeds: dict[str, Any] = {IDS: ids, MASK: mask}
        feeds |= {TYPES: np.zeros_like(ids)} if TYPES in model.inputs else {}
        feeds |= {TEXTS: np.array(rows, object)} if for_server else {}
        found.append(Trial(f"texts {start + 1} to {start + len(rows)}", feeds, traits=frozenset({"padding"})))
    return found


def _tokenizer(model: Model) -> tuple[Any, str, int]:
    """It, the prompt, and the most tokens of a text."""
    assert model.folder is not None
    with library_errors(lambda said: CheckpointError(f"{model.folder}: its tokenizer does not load ({said})")):
        tokenizer = offline_transformers().AutoTokenizer.from_pretrained(
            model.folder, local_files_only=True, trust_remote_code=False
        )
    settings = model.folder / "sentence_bert_config.json"
    stated = read_json(settings, CheckpointError).get("max_seq_length") if settings.is_file() else None
    most = min(tokenizer.model_max_length, model.facts.positions or _USUAL, stated or _USUAL, _USUAL)
    config = read_model_config(model.folder)
    return tokenizer, config.texts.get(config.default_prompt_name or "", ""), most


def has_library(model: Model) -> bool:
    """Whether it is a folder of sentence-transformers, and that library is here to run it."""
    return isinstance(model.module, Wrapped) and model.module.sentence_head is not None and is_installed()


def library_of(model: Model, export: BundleTexts) -> Model:
    """The folder of ``model`` as the library reads it, with the layers of the ``export``, cut where it cuts; the
    export's kind names the library. Raises CheckpointError for a folder that the library refuses."""
    assert model.folder is not None
    longest = export.largest[1] if export.largest is not None else _USUAL
    library = Library(model.folder, export.embeddings, longest)
    if export.depth is not None and (stack := layer_list(open_source(model.folder).architecture)) is not None:
        library.keep_layers(stack, export.depth)
    export.kind = f"bundle, texts; beside {library.version}"
    names = [spec.name for spec in library.outputs]
    return replace(
        model,
        module=library,
        call=lambda module, given: dict(zip(names, module(*given.values()), strict=True)),
    )


def library_trials(model: Model, texts: Sequence[str]) -> list[Trial]:
    """``texts`` behind the prompts that the folder names, as tokens of the library's own."""
    library: Any = model.module
    return [
        Trial(
            case.name,
            {
                **case.feeds,
                TEXTS: np.array(case.texts, object),
                PROMPT_NAME: np.array([case.prompt_name] * len(case.texts), object),
            },
            traits=frozenset({"padding"}),
        )
        for case in library.cases(texts)
    ]
