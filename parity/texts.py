"""Texts as cases, by the model's own tokenizer, behind its default prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from ..errors import CheckpointError, InputError
from ..exporters.checkpoints.config import offline_transformers
from ..exporters.sentence_transformers.text_settings import read_model_config
from ..optional import needed
from ..outside import library_errors
from ..outside_file import read_json
from .cases import IDS, MASK, TYPES, Trial
from .exports import PROMPT_NAME, TEXTS, BundleTexts, cut_name
from .model import Model, Named, Wrapped

# One word, one letter, several scripts, code, much white space, and one that is longer than most models take.
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "a",
    "Wie spät ist es? Der letzte Zug fährt um 23:41 Uhr von Gleis 7 ab.",
    "def parity(a, b): return abs(a - b) <= 1e-5",
    "北京的秋天很美，很多人去香山看红叶。",
    "   white   space   ",
    "word " * 600,
)
_ROWS = 8  # texts of one case
_USUAL = 512  # tokens


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
    has_modules = isinstance(model.module, Wrapped) and model.module.sentence_head is not None
    return has_modules and find_spec("sentence_transformers") is not None


class Library(torch.nn.Module):
    """A folder as sentence-transformers itself runs it, and its vectors cut to each of ``cuts``, as its ``encode`` cuts
    them with ``truncate_dim``, and ``normalizes`` as with ``normalize_embeddings``."""

    def __init__(self, encoder: Any, output: str, cuts: Sequence[int], normalizes: bool) -> None:
        super().__init__()
        self.encoder, self.output, self.cuts, self.normalizes = encoder, output, cuts, normalizes

    def forward(self, given: Named) -> Named:
        """Vectors of tokens by name."""
        vectors = self.encoder({**given, "modality": "text"})["sentence_embedding"][..., : self.encoder.truncate_dim]
        found = {self.output: vectors}
        for cut in self.cuts:
            first = vectors[..., :cut]
            found[cut_name(self.output, cut)] = normalize(first, dim=-1) if self.normalizes else first
        return found


def library_of(model: Model, export: BundleTexts) -> Model:
    """The folder of ``model`` as the library reads it, which cuts texts where the ``export`` does; the export's kind
    names it. Raises CheckpointError for a folder that the library refuses."""
    library = needed("sentence_transformers", "texts", "sentence-transformers", "leave them out")
    export.kind = f"bundle, texts; beside sentence-transformers {library.__version__}"
    with library_errors(lambda said: CheckpointError(f"{model.folder}: the library does not load it ({said})")):
        encoder = library.SentenceTransformer(str(model.folder), device="cpu", local_files_only=True).float().eval()
    longest = export.largest[1] if export.largest is not None else _USUAL
    encoder.max_seq_length = min(encoder.max_seq_length or longest, longest)
    spec = export.embedding
    whole = Library(encoder, spec.name, export.cuts, spec.normalisation is not None)
    return replace(model, module=whole, call=lambda module, given: module(given))


def library_trials(model: Model, texts: Sequence[str]) -> list[Trial]:
    """``texts`` behind every prompt that the folder names, as tokens of the library's own."""
    encoder: Any = model.module.encoder
    assert model.folder is not None
    prompts = read_model_config(model.folder)
    found = []
    for name in (None, *(name for name in prompts.texts if name != prompts.default_prompt_name)):
        prompt = prompts.texts.get(name or prompts.default_prompt_name or "", "")
        behind = "" if name is None else f", prompt {name}"
        for start in range(0, len(texts), _ROWS):
            rows = list(texts[start : start + _ROWS])
            with library_errors(lambda said: InputError(f"{model.label}: does not take the texts ({said})")):
                made = encoder.preprocess(rows, prompt=prompt or None)
            feeds: dict[str, Any] = {key: each.numpy() for key, each in made.items() if isinstance(each, torch.Tensor)}
            if "prompt_length" in made:
                feeds["prompt_length"] = np.full(len(rows), made["prompt_length"], np.int64)
            feeds |= {TEXTS: np.array(rows, object), PROMPT_NAME: np.array([name] * len(rows), object)}
            title = f"texts {start + 1} to {start + len(rows)}{behind}"
            found.append(Trial(title, feeds, traits=frozenset({"padding"})))
    return found
