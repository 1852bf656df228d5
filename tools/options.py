"""Options of commands, made of the fields of a request or function, and those that commands alone have."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from ..argument_types import again, options_of
from ..bucket import Bucket
from ..errors import InputError, ProfileError
from ..profiles.budget import BudgetSpec, parse_budget
from ..profiles.compile_request import CompileRequest
from ..profiles.device_profile import DeviceProfile
from ..profiles.job_file import is_job_name, load_job
from ..profiles.precision import PRECISIONS, Precision
from ..runtime.exits.policy import ExitPolicy, read_exits

F = TypeVar("F", bound=Callable[..., Any])
_UNIONS = (Union, UnionType)


class Written(click.ParamType):  # type: ignore[type-arg]  # generic in new releases of click only
    """A value as the command line writes it, called ``name`` there and read by ``read``, which raises ValueError or
    ProfileError for a text that is none."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name, self._read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._read(value) if isinstance(value, str) else value
        except (ValueError, ProfileError) as failure:
            self.fail(str(failure), param, ctx)


def _shape(text: str) -> Bucket:
    shape = Bucket.parse(text)
    if not shape.is_static:
        raise ValueError(f"{text}: expected one shape, such as {shape.largest}")
    return shape


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r}: expected whole numbers with commas between, such as 3,6,9") from None


def _precisions(text: str) -> tuple[Precision, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in PRECISIONS:
            raise ValueError(f"{name!r}: expected some of {', '.join(PRECISIONS)}, with commas between")
    return tuple(precision for name in names for precision in PRECISIONS if precision == name)


def _pair(expected: str, read: Callable[[str], Any]) -> Callable[[str], tuple[str, Any]]:
    """Reads ``NAME=VALUE``, both of them something."""

    def pair(text: str) -> tuple[str, Any]:
        name, _, value = (part.strip() for part in text.partition("="))
        try:
            if name and value:
                return name, read(value)
        except ValueError:
            pass
        raise ValueError(f"{text!r}: expected {expected}")

    return pair


def _fractions(text: str) -> tuple[float, ...]:
    return tuple(float(item) for item in text.split(","))


BUCKET = Written("BATCHxSEQUENCE", Bucket.parse)
SHAPE = Written("BATCHxSEQUENCE", _shape)
BUDGET = Written("METRIC<=X[,...]", parse_budget)
LEVELS = Written("KIND=F,F,...", _pair("an axis kind and fractions, such as ffn=0.25,0.5,1", _fractions))
VARIANT = Written("COMPUTATION=VARIANT", _pair("a computation and its variant, such as moe.combine=one_hot", str))
TASK = Written("NAME=FOLDER", _pair("the name of a task and its folder, such as reviews=FOLDER", Path))
EXPORT_NAME = Written("EXPORT=MODEL", _pair("a name of the export and the model's, such as tokens=input_ids", str))
NUMBERS = Written("N,N,...", _numbers)
PRECISION_LIST = Written("P,P,...", _precisions)
EXITS = Written("off|NAME|TAU[,TAU...]", read_exits)
# Options of a job that one beside it excludes.
_IN_PLACE_OF = {
    "text": ("data",),
    "data": ("text",),
    "pairs": ("exits", "dimensions"),
    "exits": ("pairs",),
    "dimensions": ("pairs",),
}
_PATH = click.Path(path_type=Path)
# By the type of a field, or one of its alternatives; others are read as click does.
_TYPES: Mapping[Any, click.ParamType] = {  # type: ignore[type-arg]
    DeviceProfile: click.STRING,
    Mapping[str, BudgetSpec]: BUDGET,
    Mapping[str, Sequence[float]]: LEVELS,
    Mapping[str, str]: VARIANT,
    Mapping[str, str | Path]: TASK,
    Sequence[str | Bucket]: BUCKET,
    Bucket: SHAPE,
    Sequence[int]: NUMBERS,
    tuple[int, ...]: NUMBERS,
    Sequence[Precision]: PRECISION_LIST,
    ExitPolicy: EXITS,
}


def once_each(ctx: click.Context, param: click.Parameter, stated: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Callback of a repeatable ``NAME=...`` option: a name said twice is refused, where the last would win."""
    names = [name for name, _ in stated]
    for name in names:
        if names.count(name) > 1:
            raise click.BadParameter(f"{name} is given {names.count(name)} times; say it once", ctx, param)
    return dict(stated)


def _given(ctx: click.Context, param: click.Parameter, stated: tuple[tuple[str, Any], ...]) -> dict[str, Any] | None:
    """``once_each``, but None where none was given, which a request tells from an empty mapping."""
    return once_each(ctx, param, stated) or None


def _some(_ctx: click.Context, _param: click.Parameter, stated: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return stated or None


def field_options(owner: Any, *names: str, **defaults: str) -> Callable[[F], F]:
    """Decorates a command with an option for each of these fields of ``owner``, a request or a function whose
    parameters state help and bounds; the command gets them under their names. ``defaults`` describe what takes the
    place of a field's default in this command, which then gets None."""
    stated, hints = options_of(owner), get_type_hints(owner)

    def decorate(command: F) -> F:
        for name in reversed((*names, *defaults)):
            each = stated[name]
            if name in defaults:
                each = again(each, default=None, help=f"{each.metadata['help']} Default: {defaults[name]}.")
            command = _field_option(name, each, hints[name])(command)
        return command

    return decorate


def _field_option(name: str, field: Field[Any], hint: Any) -> Callable[[F], F]:
    stated, flag = field.metadata, f"--{field.metadata.get('option', name).replace('_', '-')}"
    settings: dict[str, Any] = {"help": stated["help"], "metavar": stated.get("metavar")}
    if stated.get("required") or (field.default is MISSING and field.default_factory is MISSING):
        settings["required"] = True
    elif field.default is not MISSING:
        shown = field.default not in (None, ()) and field.default is not False
        settings |= {"default": field.default, "show_default": shown}
    if hint is bool:
        return click.option(f"{flag}/--no-{flag[2:]}" if field.default else flag, name, is_flag=True, **settings)
    alternatives = _alternatives(hint)
    kind = _value_type(stated, alternatives)
    origins = {get_origin(one) for one in alternatives}
    if Mapping in origins:
        settings["callback"] = _given if field.default is None else once_each
    is_one = kind in (NUMBERS, PRECISION_LIST, EXITS) or _is_path(alternatives)
    if Mapping in origins or (Sequence in origins and not is_one):
        settings |= {"multiple": True, "help": f"{stated['help']} Repeatable."}
        if Mapping not in origins and field.default is None:
            settings["callback"] = _some
    return click.option(flag, name, type=kind, **settings)


def _alternatives(hint: Any) -> list[Any]:
    """The types that a value may have, None left out."""
    return [one for one in get_args(hint) if one is not type(None)] if get_origin(hint) in _UNIONS else [hint]


def _is_path(alternatives: Sequence[Any]) -> bool:
    return Path in alternatives or os.PathLike[str] in alternatives


def _value_type(stated: Mapping[str, Any], alternatives: Sequence[Any]) -> Any:
    """The reader of a value of one of these types."""
    for one in alternatives:
        if one in _TYPES:
            return _TYPES[one]
    if _is_path(alternatives):
        return _PATH
    first = alternatives[0]
    if get_origin(first) is Sequence:
        return _value_type(stated, _alternatives(get_args(first)[0]))
    if choices := stated.get("choices") or [
        choice for one in alternatives if get_origin(one) is Literal for choice in get_args(one)
    ]:
        return click.Choice(choices)
    if first is int:
        return click.IntRange(stated.get("min"), stated.get("max"))
    if first is float:
        above = stated.get("above")
        return FiniteRange(stated.get("min", above), stated.get("max"), min_open=above is not None)
    return click.STRING


class FiniteRange(click.FloatRange):
    """As of click, whose bounds let ``nan`` pass, and ``inf`` where there is no upper one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if not isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        return found


def path_option(flag: str, help: str, *name: str, metavar: str = "FILE", **settings: Any) -> Callable[[F], F]:
    """An option that takes a path, which only the command line has; the command gets it under ``name``."""
    return click.option(flag, *name, type=_PATH, metavar=metavar, help=help, **settings)


def given_settings() -> dict[str, str]:
    """The options that the command line, or its environment, states of the command which runs, by their settings."""
    context = click.get_current_context()
    stated = [each for each in context.command.params if isinstance(each, click.Option) and each.name is not None]
    default = click.core.ParameterSource.DEFAULT
    given = ((str(each.name), each.opts[0]) for each in stated)
    return {name: option for name, option in given if context.get_parameter_source(name) is not default}


def of_job(model: Path, settings: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """``model`` and the ``settings`` of a command; where that is the file of a job its model and options, in whose
    place stand those that the command line states. Raises InputError for a file that is no job."""
    if not is_job_name(model) or model.is_dir():
        return model, dict(settings)
    saved, stated = load_job(model), given_settings()
    replaced = {*stated, *(other for name in stated for other in _IN_PLACE_OF.get(name, ()))}
    found = {**settings, **{name: value for name, value in saved.items() if name not in replaced}}
    return Path(found.pop("model")), found


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, nothing else.")
overwrite_option = field_options(CompileRequest, "overwrite")
model_argument = click.argument("model", type=_PATH)
bundle_argument = click.argument("bundle", type=_PATH)
texts_option = path_option("--text", "UTF-8 file of texts, one a line.")
merge_option = click.option(
    "--merge", is_flag=True, help="Merge the task into the weights of engines of its own, in place of inputs."
)


def merged_tasks(task: str | None, merge: bool) -> tuple[str, ...]:
    """The ``merge`` that a bundle is loaded with. Raises UsageError for --merge without a task."""
    if merge and task is None:
        raise click.UsageError("--merge is for --task")
    return (task,) if merge and task is not None else ()


def require_text_options(texts: bool, truncate: bool, prompt: str | None, prompt_name: str | None) -> None:
    """Raises UsageError for two prompts, and for options of texts without any."""
    if prompt is not None and prompt_name is not None:
        raise click.UsageError("expected at most one of --prompt and --prompt-name")
    if not texts and (truncate or prompt is not None or prompt_name is not None):
        raise click.UsageError("--truncate, --prompt and --prompt-name are for texts")


@dataclass(frozen=True)
class TextLines:
    """The texts in the file's order, and how many ``blank`` lines were left out."""

    texts: tuple[str, ...]
    blank: int


def read_text_lines(path: Path) -> TextLines:
    """Reads a UTF-8 file; a text is a line without the white space around it, and repeated texts stay.

    Raises InputError for what ``read_text_file`` refuses, and for a file without any text.
    """
    from ..runtime.inputs.files import read_text_file

    text = read_text_file(path)
    lines = [line.strip() for line in text.removesuffix("\n").split("\n")] if text else []
    texts = tuple(line for line in lines if line)
    if not texts:
        raise InputError(f"{path}: has no texts; expected one a line")
    return TextLines(texts, len(lines) - len(texts))
