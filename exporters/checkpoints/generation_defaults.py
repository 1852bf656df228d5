"""How a folder says that its model generates: the tokens that end a text, and how the next one is picked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ...errors import CheckpointError, InputError
from ...runtime.generation.sampling import Sampling
from ...strict import structure
from .checkpoint import Checkpoint, read_json

_FILE = "generation_config.json"
# Settings of transformers that change which tokens come and are not read here, with what changes nothing.
_OTHERS: Mapping[str, Any] = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "sequence_bias": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
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
    "num_return_sequences": 1,
    "force_words_ids": None,
    "constraints": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "token_healing": False,
}
_OTHERS_OF_CHANCE: Mapping[str, Any] = {"typical_p": 1, "top_h": None, "epsilon_cutoff": 0, "eta_cutoff": 0}


@dataclass(frozen=True)
class GenerationDefaults:
    """``end_ids`` end a text, ``begin_id`` begins it where a tokenizer adds one. ``sampling`` is what the folder
    states, greedy unless it asks for chance. ``left_out`` names settings that transformers would follow too and
    nestforge does not. A folder that states no end has none: what its class has by default counts for models that are
    made anew, not for those that transformers loads. ``beyond`` are stated tokens that the vocabulary lacks, with their
    keys, such as ``eos_token_id 50256``: none of them can come, so neither ends nor begins a text."""

    end_ids: tuple[int, ...]
    begin_id: int | None
    sampling: Sampling
    left_out: tuple[str, ...]
    beyond: tuple[str, ...] = ()


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


def read_generation_defaults(checkpoint: Checkpoint, vocabulary: int) -> GenerationDefaults:
    """Of ``generation_config.json``, or of ``config.json`` where that file is missing, as transformers has it, for a
    model of so many tokens.

    Raises CheckpointError for a file that cannot be read and for values that make no sense.
    """
    path = checkpoint.folder / _FILE
    if path.is_file():
        data: Mapping[str, Any] = read_json(path)
    else:
        path, data = checkpoint.folder / "config.json", checkpoint.config
    given = {key: value for key, value in data.items() if value is not None}
    known = {key.name: given[key.name] for key in fields(_Stated) if key.name in given}
    stated = structure(_Stated, known, str(path), CheckpointError)
    others = {**_OTHERS, **_OTHERS_OF_CHANCE} if stated.do_sample else _OTHERS
    ends = stated.eos_token_id if isinstance(stated.eos_token_id, tuple) else (stated.eos_token_id,)
    begins = () if stated.bos_token_id is None else (stated.bos_token_id,)
    tokens = [("eos_token_id", token) for token in ends] + [("bos_token_id", token) for token in begins]
    return GenerationDefaults(
        end_ids=tuple(token for token in ends if token < vocabulary),
        begin_id=next((token for token in begins if token < vocabulary), None),
        sampling=_sampling(stated, str(path)),
        left_out=tuple(key for key, neutral in others.items() if given.get(key, neutral) not in (neutral, [], {})),
        beyond=tuple(f"{key} {token}" for key, token in tokens if token >= vocabulary),
    )


def read_decoder_start(checkpoint: Checkpoint, vocabulary: int) -> int:
    """The token with which a decoder that reads an encoder begins, of either file. Raises CheckpointError for none."""
    path = checkpoint.folder / _FILE
    stated = read_json(path) if path.is_file() else {}
    key = "decoder_start_token_id"
    value: Any = stated.get(key)
    value = checkpoint.config.get(key) if value is None else value
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
