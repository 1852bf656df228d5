"""How sentence-transformers prepares a text before it is tokenised: case, length, prompts (no torch here).

``sentence_bert_config.json`` is read strictly: a setting that would make other tokens of a text, and is not honoured,
is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...bundle.manifest import TextEntry
from ...errors import CheckpointError
from ...outside_file import read_json
from ...strict import nearest, structure
from ..checkpoints.checkpoint import MODULES_FILE, Checkpoint
from .modules import TOKENS

_CONFIG_FILE = "config_sentence_transformers.json"

_MODEL_TYPE = "SentenceTransformer"

# The other kinds of sentence-transformers 6.2.
_OTHER_KINDS = {
    "CrossEncoder": "scores pairs of texts",
    "SparseEncoder": "gives sparse vectors over a vocabulary",
    "MultiVectorEncoder": "gives a vector for every token",
}


@dataclass(frozen=True)
class ModelConfig:
    """``prompts`` by name; the one called ``default_prompt_name`` stands before a text that asks for none; of an
    embedding the first ``truncate_dim`` numbers are kept. The other keys change no vector: the similarity is that of
    ``similarity()``, and versions and requirements are about packages."""

    prompts: Mapping[str, str | None] = field(default_factory=dict)
    default_prompt_name: str | None = None
    truncate_dim: int | None = field(default=None, metadata={"min": 1})
    model_type: str = _MODEL_TYPE
    similarity_fn_name: str | None = None
    requirements: Any = None
    __version__: Any = None

    @property
    def texts(self) -> dict[str, str]:
        """The prompts; one that is null is empty."""
        return {name: prompt or "" for name, prompt in self.prompts.items()}


def read_model_config(folder: Path) -> ModelConfig:
    """The file's settings; the defaults where there is none. Raises CheckpointError for what is not understood."""
    path = folder / _CONFIG_FILE
    data = read_json(path, CheckpointError) if path.is_file() else {}
    _refuse_other_kinds(path, data.get("model_type", _MODEL_TYPE))
    config = structure(ModelConfig, data, str(path), CheckpointError)
    name = config.default_prompt_name
    if name is not None and name not in config.prompts:
        raise CheckpointError(f"{path}: default_prompt_name {name[:80]!r}{nearest(name[:80], config.prompts)}")
    return config


def _refuse_other_kinds(path: Path, kind: object) -> None:
    """Before the keys of the file, which are each kind's own."""
    if kind == _MODEL_TYPE:
        return
    what = f", which {_OTHER_KINDS[str(kind)]}," if str(kind) in _OTHER_KINDS else ""
    raise CheckpointError(
        f"{path}: model_type {kind!r:.80}{what} is not supported; expected {_MODEL_TYPE!r} (without {MODULES_FILE} the "
        "folder is compiled as the transformers model that it holds)"
    )


# The first of these that is there counts.
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_MODEL_ARGUMENTS = ("model_args", "model_kwargs", "config_args", "config_kwargs")
_TOKENIZER_ARGUMENTS = ("tokenizer_args", "processor_kwargs")
# Arguments that change no vector but by rounding: engines compute in their own precision.
_HARMLESS_ARGUMENTS = frozenset({"attn_implementation", "dtype", "torch_dtype", "trust_remote_code"})
_TEXT_ONLY = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
# Larger lengths mean that there is no limit; transformers writes 10^30.
_NO_LIMIT = 2**31


@dataclass(frozen=True)
class _Transformer:
    """``sentence_bert_config.json``. ``unpad_inputs`` is about speed alone."""

    max_seq_length: int | None = field(default=None, metadata={"min": 1})
    do_lower_case: bool = False
    transformer_task: str = "feature-extraction"
    module_output_name: str = TOKENS
    modality_config: Mapping[str, Any] | None = None
    processing_kwargs: Mapping[str, Any] | None = None
    query_length: int | None = None
    document_length: int | None = None
    query_expansion: Mapping[str, Any] | None = None
    tokenizer_name_or_path: str | None = None
    unpad_inputs: bool | None = None
    model_args: Mapping[str, Any] | None = None
    model_kwargs: Mapping[str, Any] | None = None
    config_args: Mapping[str, Any] | None = None
    config_kwargs: Mapping[str, Any] | None = None
    tokenizer_args: Mapping[str, Any] | None = None
    processor_kwargs: Mapping[str, Any] | None = None


def with_text_settings(checkpoint: Checkpoint, text: TextEntry, pooled: str | None) -> TextEntry:
    """``text`` with what the folder says of texts; ``pooled`` is the input that says which tokens are pooled, if any.

    A folder without ``modules.json`` says nothing. Raises CheckpointError for a setting that is not understood.
    """
    if not checkpoint.has_modules:
        return text
    transformer, model = _transformer(checkpoint.folder), read_model_config(checkpoint.folder)
    return replace(
        text,
        max_tokens=_longest(checkpoint, transformer),
        lowercase=transformer.do_lower_case,
        prompts=model.texts or None,
        default_prompt=model.default_prompt_name,
        pooled=pooled,
    )


def _transformer(folder: Path) -> _Transformer:
    path, data = folder / _TRANSFORMER_FILES[0], {}
    for name in _TRANSFORMER_FILES:
        if (folder / name).is_file() and (data := read_json(folder / name, CheckpointError)):
            path = folder / name
            break
    stated = structure(_Transformer, data, str(path), CheckpointError)
    for problem in _refusals(stated):
        raise CheckpointError(f"{path}: {problem}")
    return stated


def _refusals(stated: _Transformer) -> list[str]:
    """Settings under which sentence-transformers would feed or read the transformer in another way."""
    problems = []
    expected: dict[str, Any] = {"transformer_task": "feature-extraction", "module_output_name": TOKENS}
    for key, usual in expected.items():
        if getattr(stated, key) != usual:
            problems.append(f"{key} {getattr(stated, key)[:80]!r} is not supported; expected {usual!r}")
    if stated.modality_config is not None and stated.modality_config != _TEXT_ONLY:
        problems.append(
            f"modality_config of {', '.join(stated.modality_config)[:80]!r} is not supported; expected that of a text "
            f"encoder, {_TEXT_ONLY}"
        )
    for key in ("processing_kwargs", "query_length", "document_length", "query_expansion", "tokenizer_name_or_path"):
        if getattr(stated, key):
            problems.append(f"{key} is not supported: it would make other tokens of a text")
    for keys, harmless in ((_MODEL_ARGUMENTS, _HARMLESS_ARGUMENTS), (_TOKENIZER_ARGUMENTS, {"trust_remote_code"})):
        for key in keys:
            for argument in sorted((getattr(stated, key) or {}).keys() - harmless):
                problems.append(f"{key}: {argument[:80]!r} is not supported; write it into the model's own files")
    return problems


def _longest(checkpoint: Checkpoint, stated: _Transformer) -> int | None:
    """Tokens that a text may have: ``max_seq_length``, else what the tokenizer's own file says."""
    path = checkpoint.folder / "tokenizer_config.json"
    data = read_json(path, CheckpointError) if path.is_file() else {}
    if (side := data.get("truncation_side", "right")) != "right":
        raise CheckpointError(f"{path}: truncation_side {side!r:.80} is not supported; expected 'right'")
    if stated.max_seq_length is not None:
        return stated.max_seq_length
    value = data.get("model_max_length")
    if value is None or (isinstance(value, int | float) and value >= _NO_LIMIT):
        return None
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{path}: model_max_length: expected a whole number of at least 1, got {value!r:.80}")
    return value
