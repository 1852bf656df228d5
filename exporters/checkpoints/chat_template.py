"""The chat template of a folder and the tokens it names, as text: nothing is compiled or run here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...outside_file import read_file
from ...runtime.generation.chat import MAX_TEMPLATE_LETTERS
from .checkpoint import read_json
from .tokenizer_file import SETTINGS_FILE

_FILE = "chat_template.jinja"
_TOKENS_FILE = "special_tokens_map.json"
# Of several templates; others are for tools and retrieval.
_DEFAULT = "default"
_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_MOST_BYTES_PER_LETTER = 4


@dataclass(frozen=True)
class StatedTemplate:
    """``source`` of a template, and by their names there (``bos_token``) the special tokens that the folder states."""

    source: str
    special_tokens: Mapping[str, str]


def read_chat_template(folder: Path) -> StatedTemplate | None:
    """What transformers' tokenizer of ``folder`` would render chats with, or None where it has no default template.

    A token that only a class of transformers would name is not among the special tokens.
    Raises CheckpointError for files that cannot be read, and for a template that the runtime would not take.
    """
    path = folder / SETTINGS_FILE
    settings = read_json(path) if path.is_file() else {}
    source = _default_of(settings.get("chat_template"), path)
    if (file := folder / _FILE).is_file():  # before what the settings state
        path, source = file, _text(file)
    if source is None:
        return None
    if len(source) > MAX_TEMPLATE_LETTERS:
        raise CheckpointError(
            f"{path}: chat template: expected at most {MAX_TEMPLATE_LETTERS} letters, got {len(source)}"
        )
    return StatedTemplate(source, _special_tokens(folder, settings))


def _default_of(stated: object, where: Path) -> str | None:
    """A template, or the default one of a list of ``{"name": ..., "template": ...}``."""
    if isinstance(stated, list) and all(isinstance(each, dict) for each in stated):
        stated = next((each.get("template") for each in stated if each.get("name") == _DEFAULT), None)
    if stated is not None and not isinstance(stated, str):
        raise CheckpointError(f"{where}: chat_template: expected a text or a list of named ones, got {stated!r:.80}")
    return stated


def _text(file: Path) -> str:
    try:
        text = read_file(file, MAX_TEMPLATE_LETTERS * _MOST_BYTES_PER_LETTER, CheckpointError).decode()
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as failure:
        raise CheckpointError(f"{file}: expected UTF-8 ({failure.reason} at byte {failure.start})") from failure


def _special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    stated = [(folder / SETTINGS_FILE, settings)]
    older = folder / _TOKENS_FILE  # where both state a token, this file counts
    if "added_tokens_decoder" not in settings and older.is_file():
        stated.append((older, read_json(older)))
    found: dict[str, str] = {}
    for path, tokens in stated:
        for name in _TOKENS:
            token = tokens.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if text is not None and not isinstance(text, str):
                raise CheckpointError(f"{path}: {name}: expected a text, got {token!r:.80}")
            if text is not None:
                found[name] = text
            elif name in tokens:
                found.pop(name, None)
    return found
