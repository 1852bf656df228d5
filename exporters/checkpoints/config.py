"""``config.json``, of transformers or like one of its own: what is read, and what is refused (no torch here).

Beside transformers' own keys, ``intermediate_size`` may list one FFN width per layer; ``nested`` says that every prefix
was trained as a model, and ``granularities`` which levels training sampled, by axis kind as fractions rising to 1.

A class of transformers computes what it reads of its configuration, so most keys are honoured by construction. Refused
is what the class would pass over in silence, what would run or fetch code, and what no submodel could keep.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from ...errors import CheckpointError
from ...strict import nearest, structure
from .checkpoint import Checkpoint

# Layers are counted through before any tensor is looked at.
MOST_LAYERS = 1024

Granularities = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Nesting:
    """How the model was trained; ``granularities`` is None where the levels are not known."""

    nested: bool = False
    granularities: Granularities | None = None


def read_nesting(checkpoint: Checkpoint, kinds: Sequence[str]) -> Nesting:
    """Configuration in config.json of a model with axes of ``kinds``. Raises CheckpointError for what makes no
    sense."""
    where = str(checkpoint.folder / "config.json")
    stated = {key: checkpoint.config[key] for key in ("nested", "granularities") if key in checkpoint.config}
    nesting = structure(Nesting, stated, where, CheckpointError)
    if nesting.granularities is not None and (problem := granularity_problem(nesting.granularities, kinds)):
        raise CheckpointError(f"{where}: {problem}")
    return nesting


def read_widths(
    checkpoint: Checkpoint, layers: int, key: str = "intermediate_size", default: int | None = None, at_least: int = 1
) -> tuple[int, ...]:
    """A width of every layer, such as FFN neurons, from one number or a list of them; ``default`` where config.json
    has none. Raises CheckpointError for anything else."""
    value: Any = checkpoint.config.get(key)
    value = default if value is None else value
    widths: list[Any] = value if isinstance(value, list) else [value] * layers
    where = f"{checkpoint.folder / 'config.json'}: {key}"
    if len(widths) != layers:
        raise CheckpointError(f"{where}: expected {layers} numbers, one per layer, got {len(widths)}")
    for width in widths:
        if type(width) is not int or width < at_least:
            raise CheckpointError(f"{where}: expected whole numbers of at least {at_least}, got {width!r:.80}")
    return tuple(widths)


def read_number(
    checkpoint: Checkpoint, key: str, default: int | None = None, at_least: int = 1, at_most: int | None = None
) -> int:
    """A whole number; ``default`` where config.json has none. Raises CheckpointError for anything else."""
    value: Any = checkpoint.config.get(key)
    value = default if value is None else value
    where = f"{checkpoint.folder / 'config.json'}: {key}"
    if type(value) is not int or value < at_least:
        raise CheckpointError(f"{where}: expected a whole number of at least {at_least}, got {value!r:.80}")
    if at_most is not None and value > at_most:
        raise CheckpointError(f"{where}: expected at most {at_most}, got {value!r:.80}")
    return value


def known_keys(cls: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the dataclass ``cls`` that ``config`` has."""
    return {key.name: config[key.name] for key in fields(cls) if key.name in config}


def granularity_problem(table: Granularities, kinds: Sequence[str]) -> str | None:
    """First problem among the levels of a model with axes of ``kinds``, or None."""
    for kind, steps in table.items():
        if kind not in kinds:
            return f"granularities: this model has no axis kind {kind[:80]!r}{nearest(kind[:80], kinds)}"
        rising = all(low < high for low, high in pairwise(steps))
        if not steps or steps[0] <= 0 or not rising or steps[-1] != 1:
            shown = ", ".join(f"{step:g}" for step in steps[:8])
            return f"granularities: {kind}: expected fractions that increase from above 0 to 1, got [{shown}]"
    if len({len(steps) for steps in table.values()}) != 1:
        return "granularities: expected equally many fractions for every axis kind, and at least one kind"
    return None


def rising_problem(key: str, values: Sequence[int], least: int, most: int) -> str | None:
    """First problem of numbers that rise from ``least`` to at most ``most``, or None."""
    if list(values) != sorted(set(values)) or any(not least <= value <= most for value in values):
        return f"{key}: expected rising numbers from {least} to {most}, got {shown(values)}"
    return None


def shown(values: Sequence[int]) -> str:
    """The first few numbers of a list, in a message."""
    return f"[{', '.join(map(str, values[:8]))}{', ...' if len(values) > 8 else ''}]"


# Implementations of attention that PyTorch has itself. Others name a package, or a kernel on the hub: code to fetch.
_ATTENTION_IMPLEMENTATIONS = (None, "eager", "sdpa")
# Activations with parameters of their own.
LEARNED = ("prelu", "xielu")


def refuse_unhonoured(checkpoint: Checkpoint, encoder_decoder: bool = False) -> None:
    """Raises CheckpointError, one line that names the key, for what would change the function and is not honoured; of
    an ``encoder_decoder`` a second sequence is honoured."""
    refuse_foreign(checkpoint)
    for problem in _problems(checkpoint.config, encoder_decoder):
        raise checkpoint.misfit(problem)


def refuse_foreign(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError, one line that names the key, for what no class of transformers honours by itself: code to
    run or fetch, quantized weights, adapters, heads that are gone."""
    for problem in _foreign(checkpoint.config):
        raise checkpoint.misfit(problem)
    adapter = checkpoint.folder / "adapter_config.json"
    if adapter.is_file():
        raise CheckpointError(
            f"{adapter}: adapters are not supported; merge the adapter into the model (merge_and_unload of peft) and "
            "save it again"
        )


def read_pad(checkpoint: Checkpoint, vocabulary: int, default: int | None) -> int | None:
    """``pad_token_id``, or ``default`` where config.json does not have the key; None where it is null or negative.

    Raises CheckpointError for one beyond the vocabulary.
    """
    value: Any = checkpoint.config.get("pad_token_id", default)
    if value is not None and (type(value) is not int or value >= vocabulary):
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'}: pad_token_id: expected a token of the vocabulary, "
            f"0..{vocabulary - 1}, or null, got {value!r:.80}"
        )
    return None if value is None or value < 0 else value


def read_classes(checkpoint: Checkpoint) -> int:
    """Classes of a head, as transformers counts them: ``num_labels``, else the labels that have names, else two."""
    labels = checkpoint.config.get("id2label")
    return read_number(checkpoint, "num_labels", default=len(labels) if isinstance(labels, Mapping) else 2)


def _foreign(config: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Problems of a configuration and of those of its parts, which stand ``at`` keys of it."""
    if config.get("auto_map"):
        yield (
            f"{at}auto_map: the folder brings code of its own, which is never run; remove the key if transformers' own "
            "class is the same model"
        )
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            yield f"{at}{key}: quantized weights are not supported; save the model in float32 or bfloat16"
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"):
        if config.get(key) not in _ATTENTION_IMPLEMENTATIONS:
            yield (
                f"{at}{key}: expected eager or sdpa, got {config[key]!r:.80}; other kernels are neither fetched nor "
                "run: remove the key"
            )
    if config.get("pruned_heads"):
        yield f"{at}pruned_heads: heads that are gone from some layers are not supported"
    for key, part in config.items():
        if isinstance(part, Mapping):
            yield from _foreign(part, f"{at}{key:.80}.")


def _problems(config: Mapping[str, Any], encoder_decoder: bool) -> Iterator[str]:
    if config.get("per_layer_config"):
        yield "per_layer_config: layers that differ in more than their FFN's width are not supported"
    positions = config.get("position_embedding_type")
    if positions not in (None, "absolute"):
        yield (
            f"position_embedding_type: {positions!r:.80} is not supported: the model's class would pass over it and "
            "use its own"
        )
    for key in ("alibi", "use_alibi"):
        if config.get(key):
            yield f"{key}: linear biases of attention (ALiBi) are not supported"
    for key in ("add_cross_attention", "is_encoder_decoder"):
        if config.get(key) and not encoder_decoder:
            yield f"{key}: a second sequence to attend to is not supported"
    for key in ("hidden_act", "hidden_activation", "activation_function"):
        if config.get(key) in LEARNED:
            yield f"{key}: {config[key]} has parameters of its own (a learned activation), which is not supported"


# As the user has it; libraries get it from us whatever that is.
_STATED_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "")


def stated_offline() -> bool:
    """Whether the user forbids the network."""
    return _STATED_OFFLINE.upper() in ("1", "ON", "YES", "TRUE")


def offline_transformers() -> Any:
    """The module ``transformers``; importing it takes seconds."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers
