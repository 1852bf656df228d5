"""Texts as cases, by the model's own tokenizer, behind its default prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import CheckpointError, InputError
from ..exporters.checkpoints.config import offline_transformers
from ..exporters.depth import layer_list
from ..exporters.sentence_transformers.library import Library, is_installed
from ..exporters.sentence_transformers.text_settings import read_model_config
from ..exporters.source import open_source
from ..outside import library_errors
from ..outside_file import read_json
from .cases import IDS, MASK, TYPES, Trial
from .exports import PROMPT_NAME, TEXTS, BundleTexts
from .model import Model, Wrapped

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
