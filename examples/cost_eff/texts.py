"""The task: which package does a docstring come from? Texts, labels, and a split that does not leak.

A text is made of prose paragraphs of one docstring, as many as fit. The split is by module: the hash of a
module's path decides the part of all its texts. A paragraph whose skeleton (its words without identifiers and numbers)
occurs in more than one module is dropped everywhere: it is boilerplate, or a copy that could be in two parts. A
paragraph that names its own package is dropped too. With such paragraphs the task would be to find a name; without
them easy texts still exist, and they are easy for what they speak of. Names of other packages stay.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer

from ...errors import CheckpointError
from ..python_text import docstrings, module_files, place_of

Part = Literal["train", "calibration", "test"]
PARTS: tuple[Part, ...] = ("train", "calibration", "test")
TokenCount = Callable[[Sequence[str]], Sequence[int]]  # with the special tokens

# Modules of every hundred.
_HELD_OUT = {"calibration": 12, "test": 12}
_SPECIAL = 2  # tokens that open and close a text
_IDENTIFIER = re.compile(r"[a-z][A-Z]|[_0-9`=()<>\[\]{}/\\|*]|\w\.\w")  # within a word
_WORD = re.compile(r"[a-z]+")
_SHORTEST = 30  # characters of a paragraph
_POOL = 32  # batches that are sorted by length together: grouping within a pool, chance between pools


@dataclass(frozen=True)
class Limits:
    """Texts of one class in one part: at most ``most``, and fewer than ``least`` in any part exclude the class.

    A text has at least ``characters``, and at most ``tokens`` with the two special ones.
    """

    most: Mapping[Part, int]
    least: Mapping[Part, int]
    characters: int
    tokens: int
    classes: int = 8  # fewer make no task


@dataclass(frozen=True)
class Text:
    text: str
    label: int


@dataclass(frozen=True)
class Corpus:
    """Texts by part, the labels' names, and how many texts each class had (``excluded`` names the reasons)."""

    parts: Mapping[Part, Sequence[Text]]
    labels: Sequence[str]
    counts: Mapping[str, Mapping[Part, int]]
    excluded: Mapping[str, str]


def read_corpus(
    sources: Sequence[Source], limits: Limits, tokens_of: TokenCount, on_source: Callable[[int, int], None]
) -> Corpus:
    """Reads every source, drops what must go, and splits the rest. The same packages give the same corpus.

    Raises CheckpointError if too few classes have enough texts.
    """
    found: dict[str, dict[str, list[list[str]]]] = {}
    excluded: dict[str, str] = {}
    for index, source in enumerate(sources):
        on_source(index, len(sources))
        folder = source.folder()
        if folder is None:
            excluded[source.label] = "the package is not installed"
            continue
        modules = {f"{source.label}/{file.relative_to(folder).as_posix()}": file for file in module_files(folder)}
        found[source.label] = {module: list(docstrings(file, _SHORTEST)) for module, file in modules.items()}
    on_source(len(sources), len(sources))
    shared = _shared_skeletons(chain.from_iterable(modules.values() for modules in found.values()))
    chosen: dict[str, dict[Part, list[str]]] = {}
    for source in sources:
        if source.label not in found:
            continue
        parts = _texts_by_part(found[source.label], source, shared, limits, tokens_of)
        if any(len(parts[part]) < limits.least[part] for part in PARTS):
            counts = (f"{len(parts[part])} {part} texts of at least {limits.least[part]}" for part in PARTS)
            excluded[source.label] = f"too few: {', '.join(counts)}"
        else:
            chosen[source.label] = {part: parts[part][: limits.most[part]] for part in PARTS}
    if len(chosen) < limits.classes:
        raise CheckpointError(
            f"training texts: {len(chosen)} packages have enough docstrings, expected at least {limits.classes}; "
            "run `make setup` and train in its environment"
        )
    labels = sorted(chosen)
    by_part = {
        part: tuple(
            sorted(
                (Text(text, number) for number, label in enumerate(labels) for text in chosen[label][part]),
                key=lambda item: _digest(item.text),
            )
        )
        for part in PARTS
    }
    counts_of = {label: {part: len(texts) for part, texts in chosen[label].items()} for label in labels}
    return Corpus(by_part, labels, counts_of, excluded)


def part_of(module: str) -> Part:
    """The part to which every text of ``module`` belongs."""
    place = place_of(module)
    for part in PARTS[1:]:
        if place < _HELD_OUT[part]:
            return part
        place -= _HELD_OUT[part]
    return "train"


def skeleton(text: str) -> str:
    """Key shared by two texts that differ in identifiers, numbers, case or punctuation alone."""
    return " ".join(_WORD.findall(" ".join(word for word in text.split() if not _IDENTIFIER.search(word)).lower()))


def to_jsonl(texts: Iterable[Text]) -> str:
    """One ``{"text": ..., "label": ...}`` a line."""
    return "".join(json.dumps({"text": item.text, "label": item.label}, ensure_ascii=False) + "\n" for item in texts)


def read_jsonl(path: Path) -> list[Text]:
    """The texts that ``to_jsonl`` wrote."""
    return [Text(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _shared_skeletons(modules: Iterable[Sequence[Sequence[str]]]) -> set[str]:
    """Skeletons of paragraphs that occur in more than one module; a module is its docstrings' paragraphs."""
    modules_with: Counter[str] = Counter()
    for docs in modules:
        modules_with.update({skeleton(paragraph) for doc in docs for paragraph in doc})
    return {shape for shape, count in modules_with.items() if count > 1}


def _texts_by_part(
    modules: Mapping[str, Sequence[Sequence[str]]],
    source: Source,
    shared: set[str],
    limits: Limits,
    tokens_of: TokenCount,
) -> dict[Part, list[str]]:
    """The texts of one source by part, in the order of their hash, each paragraph in one text alone."""
    own_name = re.compile(source.own_names, re.IGNORECASE)
    usable: list[tuple[Part, list[str]]] = []  # one docstring each
    for module, docs in modules.items():
        seen = set(shared)
        for doc in docs:
            usable.append((part_of(module), []))
            for paragraph in doc:
                shape = skeleton(paragraph)
                if shape not in seen and not own_name.search(paragraph):
                    usable[-1][1].append(paragraph)
                seen.add(shape)
    tokens = iter(tokens_of([paragraph for _, doc in usable for paragraph in doc]))
    parts: dict[Part, list[str]] = {part: [] for part in PARTS}
    for part, doc in usable:
        packed = _packed([(paragraph, next(tokens)) for paragraph in doc], limits.tokens)
        parts[part] += [text for text in packed if len(text) >= limits.characters]
    return {part: sorted(texts, key=_digest) for part, texts in parts.items()}


def _packed(paragraphs: Iterable[tuple[str, int]], most_tokens: int) -> list[str]:
    """Paragraphs, each with its tokens, joined in order while they fit; one too long by itself is left out."""
    texts: list[str] = []
    left = 0
    for paragraph, tokens in paragraphs:
        if tokens - _SPECIAL <= left:
            texts[-1] += f" {paragraph}"
            left -= tokens - _SPECIAL
        elif tokens <= most_tokens:
            texts.append(paragraph)
            left = most_tokens - tokens
    return texts


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True)
class Source:
    """One class of the task: a label, the import package its texts come from (None is the standard library), and a
    pattern of that package's own names."""

    label: str
    package: str | None
    own_names: str

    def folder(self) -> Path | None:
        """Where the package lies, found without running any of its code; None if it is not installed."""
        if self.package is None:
            return Path(sysconfig.get_path("stdlib"))
        spec = find_spec(self.package)
        places = spec.submodule_search_locations if spec else None
        return Path(next(iter(places))) if places else None


# Packages that the pinned development environment brings, each with a subject of its own, and the standard library.
SOURCES = (
    Source("stdlib", None, r"standard library|cpython"),
    Source("huggingface_hub", "huggingface_hub", r"hugging ?face"),
    Source("hypothesis", "hypothesis", r"\bhypothesis\b"),
    Source("mypy", "mypy", r"mypy"),
    Source("networkx", "networkx", r"networkx|\bnx\."),
    Source("numpy", "numpy", r"numpy|\bnp\."),
    Source("pydantic", "pydantic", r"pydantic"),
    Source("rich", "rich", r"\brich\b"),
    Source("sympy", "sympy", r"sympy"),
    Source("torch", "torch", r"torch"),
    Source("transformers", "transformers", r"transformers"),
)


@dataclass(frozen=True)
class Batch:
    """Ids and mask ``[B, S]`` int64, labels ``[B]`` int64."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """Tokenised texts of one part, in order."""

    ids: Sequence[Sequence[int]]
    labels: Sequence[int]
    pad: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    def batch(self, rows: Sequence[int]) -> Batch:
        """These rows, padded to the longest of them."""
        longest = max(len(self.ids[row]) for row in rows)
        ids = torch.full((len(rows), longest), self.pad)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            length = len(self.ids[row])
            ids[place, :length] = torch.tensor(self.ids[row])
            mask[place, :length] = 1
        return Batch(ids, mask, torch.tensor([self.labels[row] for row in rows]))

    def in_order(self, size: int) -> list[Batch]:
        """Every row once, as they stand."""
        return [self.batch(range(at, min(at + size, len(self.ids)))) for at in range(0, len(self.ids), size)]

    def shuffled(self, size: int, steps: int, seed: int) -> list[Batch]:
        """``steps`` batches of ``size`` rows: epoch after epoch, each in another order."""
        chance = random.Random(seed)  # noqa: S311  (order of training, no secret)
        batches: list[Sequence[int]] = []
        while len(batches) < steps:
            rows = list(range(len(self.ids)))
            chance.shuffle(rows)
            epoch: list[Sequence[int]] = []
            for at in range(0, len(rows), size * _POOL):
                pool = sorted(rows[at : at + size * _POOL], key=lambda row: len(self.ids[row]))
                epoch += [pool[start : start + size] for start in range(0, len(pool), size)]
            chance.shuffle(epoch)
            batches += epoch
        return [self.batch(rows) for rows in batches[:steps]]


def tokenise(tokenizer: Tokenizer, texts: Sequence[Text], pad: int) -> Rows:
    """Ids of every text, with the special tokens."""
    encoded = tokenizer.encode_batch([item.text for item in texts])
    return Rows([item.ids for item in encoded], [item.label for item in texts], pad)
