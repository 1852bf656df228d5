"""Options and value types that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from ..bucket import Bucket
from ..errors import InputError, ProfileError
from ..profiles.budget import BudgetSpec, parse_budget
from ..profiles.compile_request import CompileRequest
from ..profiles.precision import PRECISIONS, Precision
from ..runtime.engines.onnxruntime_gpu.provider import PROVIDERS

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout and nothing else.")


prompt_option = click.option(
    "--prompt", metavar="TEXT", help="Text to put before each text; '' for none. Default: the model's default prompt."
)
prompt_name_option = click.option("--prompt-name", metavar="NAME", help="A prompt of the model, by name.")


def refuse_prompts(prompt: str | None, prompt_name: str | None, texts: bool) -> None:
    """Raises UsageError for two prompts, or for one without ``texts`` to put it before."""
    if prompt is not None and prompt_name is not None:
        raise click.UsageError("expected at most one of --prompt and --prompt-name")
    if not texts and (prompt is not None or prompt_name is not None):
        raise click.UsageError("--prompt and --prompt-name are for texts")


class BucketType(click.ParamType):  # type: ignore[type-arg]  # generic in new releases of click only
    """``1x128``: batch and sequence."""

    name = "BATCHxSEQUENCE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Bucket:
        try:
            return value if isinstance(value, Bucket) else Bucket.parse(value)
        except ValueError as failure:
            self.fail(str(failure), param, ctx)


class ShapeType(BucketType):
    """``1x128``: one shape, and no range of them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Bucket:
        shape = super().convert(value, param, ctx)
        if not shape.is_static:
            self.fail(f"{value}: expected one shape, such as {shape.largest}", param, ctx)
        return shape


class LayersType(click.ParamType):  # type: ignore[type-arg]  # as above
    """``3,6,9``: numbers of layers."""

    name = "N,N,..."
    expected = "numbers of layers, such as 3,6,9"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return value if isinstance(value, tuple) else tuple(int(item) for item in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r}: expected {self.expected}", param, ctx)


class ReductionsType(LayersType):
    """``8,5,3,1``: reductions."""

    expected = "reductions, such as 8,5,3,1"


class LevelsType(click.ParamType):  # type: ignore[type-arg]  # as above
    """``ffn=0.25,0.5,1``: an axis kind and its granularities as fractions of the full size."""

    name = "KIND=F,F,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[float, ...]]:
        kind, equals, listed = str(value).partition("=")
        try:
            fractions = tuple(float(item) for item in listed.split(","))
        except ValueError:
            fractions = ()
        if not kind or not equals or not fractions:
            self.fail(f"{value!r}: expected an axis kind and fractions, such as ffn=0.25,0.5,1", param, ctx)
        return kind.strip(), fractions


class BudgetType(click.ParamType):  # type: ignore[type-arg]  # as above
    """``ffn_parameters<=94.4M``: a budget, named by its own text."""

    name = "METRIC<=X[,...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, BudgetSpec]:
        try:
            return value if isinstance(value, tuple) else parse_budget(str(value))
        except ProfileError as failure:
            self.fail(str(failure), param, ctx)


class VariantType(click.ParamType):  # type: ignore[type-arg]  # as above
    """``moe.combine=one_hot``: what is computed, and in which variant."""

    name = "WHAT=VARIANT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        computed, equals, variant = (part.strip() for part in str(value).partition("="))
        if not computed or not equals or not variant:
            self.fail(f"{value!r}: expected what is computed and its variant, such as moe.combine=one_hot", param, ctx)
        return computed, variant


class TaskType(click.ParamType):  # type: ignore[type-arg]  # as above
    """``reviews=FOLDER``: a task by the name that requests give it, and its folder."""

    name = "NAME=FOLDER"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Path]:
        if isinstance(value, tuple):
            return value
        name, equals, folder = str(value).partition("=")
        if not name or not equals or not folder:
            self.fail(f"{value!r}: expected the name of a task and its folder, such as reviews=FOLDER", param, ctx)
        return name, Path(folder)


class PrecisionsType(click.ParamType):  # type: ignore[type-arg]  # as above
    """``fp32,int8``: precisions of engines."""

    name = "P,P,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Precision, ...]:
        if isinstance(value, tuple):
            return value
        names = [name.strip() for name in str(value).split(",")]
        for name in names:
            if name not in PRECISIONS:
                self.fail(f"{name!r}: expected some of {', '.join(PRECISIONS)}, with commas between", param, ctx)
        return tuple(precision for name in names for precision in PRECISIONS if precision == name)


def once_each(ctx: click.Context, param: click.Parameter, stated: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Callback of a repeatable ``NAME=...`` option: a name said twice is refused, where the last would win."""
    names = [name for name, _ in stated]
    for name in names:
        if names.count(name) > 1:
            raise click.BadParameter(f"{name} is given {names.count(name)} times; say it once", ctx, param)
    return dict(stated)


_UNIONS = (Union, UnionType)
# Values of fields that the command line reads in a way of its own.
_TYPES: dict[str, Any] = {
    "profile": click.STRING,
    "levels": LevelsType(),
    "budgets": BudgetType(),
    "buckets": BucketType(),
    "budget_at": ShapeType(),
    "exits": LayersType(),
    "variants": VariantType(),
    "precisions": PrecisionsType(),
    "tasks": TaskType(),
}


def field_options(request: type[Any], *names: str) -> Callable[[F], F]:
    """Decorates a command with an option for each of these fields of ``request``, a dataclass whose metadata state the
    help and bounds; the command gets them under their names."""
    stated, hints = {field.name: field for field in fields(request)}, get_type_hints(request)

    def decorate(command: F) -> F:
        for name in reversed(names):
            command = _field_option(stated[name], hints[name])(command)
        return command

    return decorate


def _field_option(field: Field[Any], hint: Any) -> Callable[[F], F]:
    stated, flag = field.metadata, f"--{field.metadata.get('option', field.name).replace('_', '-')}"
    settings: dict[str, Any] = {"help": stated["help"], "metavar": stated.get("metavar")}
    if stated.get("required"):
        settings["required"] = True
    elif field.default not in (MISSING, None, (), False):
        settings |= {"default": field.default, "show_default": True}
    if hint is bool:
        return click.option(f"{flag}/--no-{flag[2:]}" if field.default else flag, field.name, is_flag=True, **settings)
    kind, inner = _TYPES.get(field.name), _alternatives(hint)
    origins = {get_origin(one) for one in inner}
    is_mapping = Mapping in origins
    if is_mapping or (Sequence in origins and not isinstance(kind, LayersType | PrecisionsType)):
        settings |= {"multiple": True, "help": f"{stated['help']} Repeatable."}
    if is_mapping:
        settings["callback"] = once_each
    return click.option(flag, field.name, type=kind or _value_type(stated, inner), **settings)


def _alternatives(hint: Any) -> list[Any]:
    """The types that a value may have, None left out; of a sequence those of its items are asked for separately."""
    return [one for one in get_args(hint) if one is not type(None)] if get_origin(hint) in _UNIONS else [hint]


def _value_type(stated: Mapping[str, Any], alternatives: Sequence[Any]) -> Any:
    """How a value of one of these types is read."""
    first = alternatives[0]
    if get_origin(first) is Sequence:
        return _value_type(stated, _alternatives(get_args(first)[0]))
    if get_origin(first) is Literal:
        return click.Choice(get_args(first))
    if first is int:
        return click.IntRange(stated.get("min"), stated.get("max"))
    if first is float:
        above = stated.get("above")
        return click.FloatRange(stated.get("min", above), stated.get("max"), min_open=above is not None)
    return click.Path(path_type=Path) if Path in alternatives else click.STRING


task_option = click.option("--task", metavar="NAME", help="Task of the bundle. Default: the base model.")
merge_option = click.option(
    "--merge",
    is_flag=True,
    help="Merge the task into the weights of its own engines, in place of inputs.",
)


def merged_tasks(task: str | None, merge: bool) -> tuple[str, ...]:
    """The ``merge`` that a bundle is loaded with. Raises UsageError for --merge without a task."""
    if merge and task is None:
        raise click.UsageError("--merge is for --task")
    return (task,) if merge and task is not None else ()


provider_option = click.option(
    "--provider",
    type=click.Choice(PROVIDERS),
    default="cpu",
    show_default=True,
    help="Execution provider: the processor, CUDA with one copy of the weights, or TensorRT inside ONNX Runtime.",
)
overwrite_option = field_options(CompileRequest, "overwrite")
model_argument = click.argument("model", type=click.Path(path_type=Path))
bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))


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
