"""How a folder says that its model generates: the tokens that end a text, how the next one is picked, and its chat
template, as text (nothing is compiled or run here)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, InputError
from ...outside_file import read_file, read_json
from ...runtime.generation.chat import MAX_TEMPLATE_LETTERS
from ...runtime.generation.sampling import Sampling
from ...strict import structure
from .checkpoint import Checkpoint
from .config import known_keys
from .tokenizer_file import SETTINGS_FILE

_FILE = "generation_config.json"
# Settings of transformers that change which tokens come and are not read here, with what changes nothing.
_OTHERS: Mapping[str, Any] = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "sequence_bias": None,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_length": 20,
    "max_new_tokens": None,
    "max_time": None,
    "stop_strings": None,
    "watermarking_config": None,
    "return_timestamps": False,
    "num_return_sequences": 1,
    "force_words_ids": None,
    "constraints": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "token_healing": False,
}
_OTHERS_OF_CHANCE: Mapping[str, Any] = {"typical_p": 1, "top_h": None, "epsilon_cutoff": 0, "eta_cutoff": 0}
# Tokens that a decoder behind an encoder writes first and last, by the names in ``EncoderEntry``.
_FORCED = {"forced_bos_token_id": "first_id", "forced_eos_token_id": "last_id"}


@dataclass(frozen=True)
class StatedTemplate:
    """``source`` of a template, and by their names there (``bos_token``) the special tokens that the folder states."""

    source: str
    special_tokens: Mapping[str, str]


@dataclass(frozen=True)
class GenerationDefaults:
    """``end_ids`` end a text, ``begin_id`` begins it where a tokenizer adds one. ``sampling`` is what the folder
    states, greedy unless it asks for chance. ``left_out`` names settings that transformers would follow too and
    nestforge does not. A folder that states no end has none: what its class has by default counts for models that are
    made anew, not for those that transformers loads. ``beyond`` are stated tokens that the vocabulary lacks, with their
    keys, such as ``eos_token_id 50256``: none of them can come, so neither ends nor begins a text. ``template`` is the
    one for chats. ``forced`` are the first and the last token of what a decoder writes behind an encoder, by their
    names in ``EncoderEntry``; ``suppressed`` and ``suppressed_first`` as of ``GenerationEntry``."""

    end_ids: tuple[int, ...]
    begin_id: int | None
    sampling: Sampling
    left_out: tuple[str, ...]
    beyond: tuple[str, ...] = ()
    template: StatedTemplate | None = None
    forced: Mapping[str, int] = field(default_factory=dict)
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    def notes(self, vocabulary: int) -> tuple[str, ...]:
        """Settings that engines of a model of so many tokens do not follow, and those that the folder lacks."""
        notes = []
        if self.left_out:
            notes.append(f"generation does not follow {', '.join(self.left_out)}, which the model's folder states")
        if self.beyond:
            notes.append(
                f"the model's folder states {', '.join(self.beyond)}, beyond its vocabulary of {vocabulary} tokens: no "
                "such token can come"
            )
        if not self.end_ids:
            of_it = " of its vocabulary" if self.beyond else ""
            notes.append(
                f"the model's folder states no eos_token_id{of_it}: a text ends at a stop of the request's or at its "
                "`max_tokens`"
            )
        return tuple(notes)


@dataclass(frozen=True)
class _Stated:
    """The keys of the file, with what transformers takes where they are missing or null."""

    bos_token_id: int | None = field(default=None, metadata={"min": 0})
    eos_token_id: int | tuple[int, ...] = field(default=(), metadata={"min": 0})
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    forced_bos_token_id: int | None = field(default=None, metadata={"min": 0})
    forced_eos_token_id: int | None = field(default=None, metadata={"min": 0})
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()


def read_generation_defaults(
    checkpoint: Checkpoint, vocabulary: int, behind_encoder: bool = False
) -> GenerationDefaults:
    """The defaults in ``generation_config.json``, or in ``config.json`` where that file is missing, as transformers has
    it, for a model of so many tokens, with its chat template.

    Raises CheckpointError for a file that cannot be read and for values that make no sense.
    """
    path = checkpoint.folder / _FILE
    if path.is_file():
        data: Mapping[str, Any] = read_json(path, CheckpointError)
    else:
        path, data = checkpoint.folder / "config.json", checkpoint.config
    given = {key: value for key, value in data.items() if value is not None}
    stated = structure(_Stated, known_keys(_Stated, given), str(path), CheckpointError)
    others = {**_OTHERS, **_OTHERS_OF_CHANCE} if stated.do_sample else _OTHERS
    ends = stated.eos_token_id if isinstance(stated.eos_token_id, tuple) else (stated.eos_token_id,)
    begins = () if stated.bos_token_id is None else (stated.bos_token_id,)
    tokens = [("eos_token_id", token) for token in ends] + [("bos_token_id", token) for token in begins]
    forced = dict[str, int]()
    for key, name in _FORCED.items() if behind_encoder else ():
        others = {other: neutral for other, neutral in others.items() if other != key}
        if (token := getattr(stated, key)) is not None:
            tokens.append((key, token))
            forced[name] = token
    return GenerationDefaults(
        end_ids=tuple(token for token in ends if token < vocabulary),
        begin_id=next((token for token in begins if token < vocabulary), None),
        sampling=_sampling(stated, str(path)),
        left_out=tuple(key for key, neutral in others.items() if given.get(key, neutral) not in (neutral, [], {})),
        beyond=tuple(f"{key} {token}" for key, token in tokens if token >= vocabulary),
        template=read_chat_template(checkpoint.folder),
        forced={name: token for name, token in forced.items() if token < vocabulary},
        suppressed=tuple(token for token in stated.suppress_tokens if 0 <= token < vocabulary),
        suppressed_first=tuple(token for token in stated.begin_suppress_tokens if 0 <= token < vocabulary),
    )


def read_decoder_start(checkpoint: Checkpoint, vocabulary: int, begin_for_it: bool = False) -> int:
    """The token with which a decoder that reads an encoder begins, of either file; where ``begin_for_it`` and
    neither states one, that with which texts begin, as transformers takes it (mBART). Raises CheckpointError for
    none."""
    path = checkpoint.folder / _FILE
    stated = read_json(path, CheckpointError) if path.is_file() else {}
    key = "decoder_start_token_id"
    keys = (key, "bos_token_id") if begin_for_it else (key,)
    values = [file.get(name) for name in keys for file in (stated, checkpoint.config)]
    value: Any = next((each for each in values if each is not None), None)
    if type(value) is not int or not 0 <= value < vocabulary:
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'}: {key}: expected a token of the vocabulary, 0..{vocabulary - 1}, "
            f"with which the decoder begins (for T5 that of padding), got {value!r:.80}"
        )
    return value


def _sampling(stated: _Stated, where: str) -> Sampling:
    try:
        if not stated.do_sample:  # the filters are for chance alone
            return Sampling(repetition_penalty=stated.repetition_penalty)
        return Sampling(
            stated.temperature, stated.top_k, stated.top_p, stated.min_p, repetition_penalty=stated.repetition_penalty
        )
    except InputError as failure:
        raise CheckpointError(f"{where}: {failure}") from failure


_TEMPLATE_FILE = "chat_template.jinja"
_TOKENS_FILE = "special_tokens_map.json"
# The one of several templates; others are for tools and retrieval.
_DEFAULT = "default"
_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_MOST_BYTES_PER_LETTER = 4


def read_chat_template(folder: Path) -> StatedTemplate | None:
    """Template with which transformers' tokenizer of ``folder`` would render chats, or None where it has no default
    template.

    A token that only a class of transformers would name is not among the special tokens.
    Raises CheckpointError for files that cannot be read, and for a template that the runtime would not take.
    """
    path = folder / SETTINGS_FILE
    settings = read_json(path, CheckpointError) if path.is_file() else {}
    source = _default_of(settings.get("chat_template"), path)
    if (file := folder / _TEMPLATE_FILE).is_file():  # before what the settings state
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
        stated.append((older, read_json(older, CheckpointError)))
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
