"""Inputs that find faults, by a stated rule and a seed.

Of a model that reads tokens: each of the lengths 1, 2, 5, the traced one, 16, 33 and the longest (what the model has
positions for; at most 2048, and beyond 512 only where weights times tokens stay below 2^34), in batches of one to
three; rows padded on the right, on the left and inside; the first and last tokens of the vocabulary, those whose rows
the export stores otherwise, one token repeated, other types of tokens. Of one that reads numbers: normal and uniform
ones, zeros, values at the ends of what is legal, one impulse. A size that the export declares fixed stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..compiler.parity.cases import Case
from ..runtime.inputs.arrays import Array
from .export import Export, Port
from .match import Match
from .model import Facts, Model

_USUAL, _LONGEST = 512, 2048
_MOST_PRODUCTS = 2**34  # weights times tokens
_TRACED = 64
_LENGTHS = (1, 2, 5, 16, 33)
IDS, MASK, TYPES, POSITIONS = "input_ids", "attention_mask", "token_type_ids", "position_ids"
_EXTREME = 6.0  # standard deviations of a normalised image or spectrum


@dataclass(frozen=True)
class Trial(Case):
    """A case and what is particular about it, by which faults are told apart."""

    traits: frozenset[str] = frozenset()
    # Tokens of each piece in which a decoder with a cache reads it; none: at once.
    pieces: tuple[int, ...] = ()


@dataclass(frozen=True)
class Shape:
    """One case to be: its name, rows, length, which places are hidden (``right``, ``left``, ``inside`` or none), its
    tokens and types."""

    name: str
    rows: int
    length: int
    hidden: str = ""
    tokens: str = "random"
    types: bool = False


def text_shapes(longest: int, traced: Sequence[int] = ()) -> list[Shape]:
    """The rule for models that read tokens; no longer than ``longest``."""
    shapes = [Shape(f"length {n}", 1, n) for n in sorted({*_LENGTHS[:3], *traced}) if n <= longest]
    size = min(16, longest)
    shapes += [
        Shape(f"3 rows of {size}", 3, size),
        Shape(f"3 rows of {size} padded right", 3, size, "right"),
        Shape(f"3 rows of {size} padded left", 3, size, "left"),
        Shape(f"2 rows of {size} hidden inside", 2, size, "inside"),
        Shape(f"2 rows of {min(33, longest)}, other types", 2, min(33, longest), types=True),
        Shape("first and last tokens of the vocabulary", 2, min(8, longest), tokens="edge"),
        Shape("one token repeated", 1, min(7, longest), tokens="same"),
        Shape(f"longest, {longest}", 1, longest),
    ]
    return list({(s.rows, s.length, s.hidden, s.tokens, s.types): s for s in shapes}.values())


def make_cases(export: Export, inputs: Sequence[Match], model: Model, seed: int) -> list[Trial]:
    """The cases of ``export`` by the model's names, always the same for one seed. Where scales were fixed on examples,
    numbers at the ends of what is legal are left out: examples have none."""
    ports = {match.model: port for match in inputs if (port := export.port(match.name)) is not None}
    ports = {port.name: port for port in model.needs} | ports
    if IDS in ports or any(name.endswith(IDS) for name in ports):
        return _text_cases(ports, model, seed, export)
    found = _number_cases(ports, model.facts, seed)
    return [trial for trial in found if export.precision != "int8" or "ends" not in trial.traits]


def of_tokens(trials: Sequence[Trial], tokens: Array) -> Trial:
    """The longest case with these tokens."""
    longest = max(trials, key=lambda trial: trial.tokens)
    feeds = {name: np.resize(tokens, a.shape) if name.endswith(IDS) else a for name, a in longest.feeds.items()}
    return replace(longest, name="tokens whose rows the export stores otherwise", feeds=feeds)


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
    """What the model has positions for, where a pass of that length in float64 takes seconds."""
    weights = sum(parameter.numel() for parameter in model.module.parameters())
    affordable = max(_USUAL, min(_LONGEST, _MOST_PRODUCTS // max(1, weights)))
    positions = model.facts.positions or _USUAL
    tables = [part for part in model.module.modules() if isinstance(part, torch.nn.Embedding)]
    # RoBERTa and its kin count positions from behind the one of padding.
    behind = [table.padding_idx + 1 for table in tables if table.num_embeddings == positions and table.padding_idx]
    return min(affordable, positions - max(behind, default=0))


def _text_cases(ports: Mapping[str, Port], model: Model, seed: int, export: Export) -> list[Trial]:
    rows, longest = export.largest or (_LONGEST, _LONGEST)
    facts = model.facts
    found: dict[tuple[tuple[int, int], str], Trial] = {}
    for number, shape in enumerate(text_shapes(min(longest, longest_of(model)), export.traced)):
        shape = replace(shape, rows=min(shape.rows, rows))
        if shape.hidden and MASK not in ports:
            continue
        trial = _text_case(shape, ports, facts, np.random.default_rng((seed, number)))
        ids = next(array for name, array in trial.feeds.items() if name.endswith(IDS))
        found.setdefault(
            (ids.shape, shape.hidden + shape.tokens + str(shape.types)), trial
        )  # fixed sizes fall together
    return list(found.values())


def _text_case(shape: Shape, ports: Mapping[str, Port], facts: Facts, rng: np.random.Generator) -> Trial:
    named = next(port for name, port in ports.items() if name.endswith(IDS))
    rows, length = fixed_size(named, (shape.rows, shape.length))
    mask = hidden_mask(shape.hidden, rows, length, rng)
    feeds: dict[str, Array] = {}
    for name, port in ports.items():
        if name.endswith(IDS):
            feeds[name] = tokens_of(shape.tokens, rows, length, facts.vocabulary or 2, rng)
        elif name.endswith(MASK):
            feeds[name] = mask
        elif name == TYPES:
            feeds[name] = rng.integers(0, facts.types or 1, (rows, length)) if shape.types else np.zeros_like(mask)
        elif name == POSITIONS:
            feeds[name] = np.arange(length)[None].repeat(rows, 0)
        else:
            feeds[name] = _plain(port, rows, length, rng)
    traits = {"padding" if shape.hidden else "", f"padded {shape.hidden}" if shape.hidden else ""}
    traits |= {"types" if shape.types and (facts.types or 1) > 1 else "", "several rows" if rows > 1 else ""}
    return Trial(shape.name, feeds, traits=frozenset(filter(None, traits)))


def fixed_size(port: Port, sizes: Sequence[int]) -> tuple[int, ...]:
    """``sizes``, where ``port`` declares one its own."""
    dims = port.dims if port.dims is not None and len(port.dims) == len(sizes) else ("",) * len(sizes)
    return tuple(dim if isinstance(dim, int) else size for dim, size in zip(dims, sizes, strict=True))


def hidden_mask(hidden: str, rows: int, length: int, rng: np.random.Generator) -> Array:
    """``[rows, length]`` int64, every row with a token, the later rows with more of them."""
    mask = np.ones((rows, length), np.int64)
    for row in range(rows):
        gone = max(1, length // (2 + 2 * row)) if length > 1 else 0
        if hidden == "right":
            mask[row, length - gone :] = 0
        elif hidden == "left":
            mask[row, :gone] = 0
        elif hidden == "inside" and length > 2:
            mask[row, 1 + rng.permutation(length - 2)[: max(1, length // 4)]] = 0
    return mask


def tokens_of(kind: str, rows: int, length: int, vocabulary: int, rng: np.random.Generator) -> Array:
    if kind == "edge":
        ends = np.array([0, vocabulary - 1, 1 % vocabulary, max(0, vocabulary - 2)])
        return np.resize(ends, (rows, length)).astype(np.int64)
    if kind == "same":
        return np.full((rows, length), int(rng.integers(0, vocabulary)), np.int64)
    return rng.integers(0, vocabulary, (rows, length))


def _plain(port: Port, rows: int, length: int, rng: np.random.Generator) -> Array:
    """An input that nothing is known of but its shape."""
    dims = port.dims or ()
    sizes = [dim if isinstance(dim, int) else (rows, length)[min(place, 1)] for place, dim in enumerate(dims)]
    if port.dtype.startswith("float"):
        return rng.standard_normal(sizes).astype(np.float32)
    return rng.integers(0, 2, sizes).astype(port.dtype)


def _number_cases(ports: Mapping[str, Port], facts: Facts, seed: int) -> list[Trial]:
    kinds = {
        "normal": lambda rng, size: rng.standard_normal(size),
        "uniform": lambda rng, size: rng.random(size),
        "zeros": lambda _, size: np.zeros(size),
        "extreme": lambda rng, size: _EXTREME * rng.choice([-1.0, 1.0], size),
        "one impulse": _impulse,
    }
    found = []
    for number, (kind, rows) in enumerate([*((kind, 1) for kind in kinds), ("normal", 2), ("uniform", 3)]):
        rng = np.random.default_rng((seed, number))
        feeds: dict[str, Array] = {}
        for name, port in ports.items():
            sizes = _sizes(port, rows, facts)
            if port.dtype.startswith("float"):
                feeds[name] = kinds[kind](rng, sizes).astype(np.float32)
            else:
                feeds[name] = rng.integers(0, facts.vocabulary or 2, sizes).astype(port.dtype)
        trait = {"several rows"} if rows > 1 else {"ends"} if kind in ("extreme", "one impulse") else set()
        name = f"{kind}, {next(iter(feeds.values())).shape}".replace("(", "").replace(")", "")
        found.append(Trial(name, feeds, traits=frozenset(trait)))
    return list({trial.name: trial for trial in found}.values())


def _impulse(_: np.random.Generator, size: tuple[int, ...]) -> Array:
    found = np.zeros(size)
    found.flat[found.size // 2] = _EXTREME
    return found


def _sizes(port: Port, rows: int, facts: Facts) -> tuple[int, ...]:
    dims = port.dims or (rows,)
    known = facts.image if facts.image is not None and len(dims) == 4 else None
    free = (rows, *(known or (8,) * (len(dims) - 1)))
    return tuple(dim if isinstance(dim, int) else size for dim, size in zip(dims, free, strict=True))
