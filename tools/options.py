"""Options and value types that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from ..bucket import Bucket
from ..errors import ProfileError
from ..profiles.budget import BudgetSpec, parse_budget
from ..profiles.device_profile import PromotionOrder
from ..profiles.precision import PRECISIONS, Precision
from ..runtime.engines.onnxruntime_gpu.provider import PROVIDERS

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


def once_each(
    ctx: click.Context, param: click.Parameter, stated: tuple[tuple[str, Any], ...]
) -> tuple[tuple[str, Any], ...]:
    """Callback of a repeatable ``NAME=...`` option: a name said twice is refused, where the last would win."""
    names = [name for name, _ in stated]
    for name in names:
        if names.count(name) > 1:
            raise click.BadParameter(f"{name} is given {names.count(name)} times; say it once", ctx, param)
    return stated


bucket_option = click.option(
    "--bucket",
    "buckets",
    type=BucketType(),
    multiple=True,
    help="Input shape, such as 1x128, or a range of them, such as 1x1..128; repeatable. Default: the profile's.",
)
budget_at_option = click.option(
    "--budget-at",
    type=ShapeType(),
    help="The shape at which budgets limit latency and FLOPs, such as 1x128. Default: the profile's.",
)
levels_option = click.option(
    "--levels",
    type=LevelsType(),
    multiple=True,
    callback=once_each,
    help="Granularities of an axis kind, such as ffn=0.25,0.5,1; repeatable. Default: the profile's, else S/M/L/XL.",
)
budget_option = click.option(
    "--budget",
    "budgets",
    type=BudgetType(),
    multiple=True,
    help="A budget in place of the profile's, such as 'ffn_parameters<=94.4M' or 'latency_ms<=50 %'; repeatable.",
)
submodel_option = click.option(
    "--submodel",
    "submodels",
    multiple=True,
    metavar="ID",
    help="This submodel too, by label (M+2: two layers promoted from M) or id (ffn768x4_1536x2); repeatable.",
)
slice_option = click.option(
    "--slice",
    "slices",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FOLDER",
    help="The submodel that this folder holds as a published slice of the model, too; repeatable.",
)
tasks_option = click.option(
    "--task",
    "tasks",
    type=TaskType(),
    multiple=True,
    callback=once_each,
    help="A task on the frozen model, by name; repeatable. Engines then take its tensors as inputs.",
)
task_option = click.option("--task", metavar="NAME", help="The task that answers. Default: the base.")
merge_option = click.option(
    "--merge",
    is_flag=True,
    help="With the task merged into the weights of engines of its own, in place of inputs.",
)
exits_option = click.option(
    "--exits",
    type=LayersType(),
    help="Layers after which a multi-exit model is cut, such as 3,6,9; the last always is one. Default: every exit.",
)


def merged_tasks(task: str | None, merge: bool) -> tuple[str, ...]:
    """The ``merge`` that a bundle is loaded with. Raises UsageError for --merge without a task."""
    if merge and task is None:
        raise click.UsageError("--merge is for --task")
    return (task,) if merge and task is not None else ()


promotion_order_option = click.option(
    "--promotion-order",
    type=click.Choice(get_args(PromotionOrder)),
    help="Which layers are promoted first between two levels. Default: the profile's, else increasing (the last ones).",
)
variant_option = click.option(
    "--variant",
    "variants",
    type=VariantType(),
    multiple=True,
    callback=once_each,
    help="The variant that engines get of a computation, such as moe.combine=one_hot; repeatable. Default: the "
    "profile's, else the cheapest on the device.",
)
precision_option = click.option(
    "--precision",
    "precisions",
    type=PrecisionsType(),
    help="Precision of engines, such as fp16; of several, such as fp32,int8, a budget takes the widest that it "
    "affords. Default: the profile's.",
)
profile_option = click.option(
    "--profile",
    metavar="NAME|FILE",
    default="host-cpu",
    show_default=True,
    help="Built-in device profile or a YAML file; an unknown name lists the built-in ones.",
)
provider_option = click.option(
    "--provider",
    type=click.Choice(PROVIDERS),
    default="cpu",
    show_default=True,
    help="Where ONNX Runtime runs engines: the processor, CUDA with one copy of the weights, or TensorRT inside it.",
)
overwrite_option = click.option(
    "--overwrite", is_flag=True, help="Replace an output that exists, in one step, once the new one is whole."
)
model_argument = click.argument("model", type=click.Path(path_type=Path))
bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))
