"""A sandbox whose templates end: in each rendering, what they compute and make counts against an allowance.

Every loop, call, filter, operator and literal of a template asks it, by the hooks that Jinja has and by what is put
into a template's tree. A result that may outgrow its operands is asked for before it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce, wraps
from typing import TYPE_CHECKING, Any

from .template_allowance import (
    Allowance,
    letters_of,
    require_formatted,
    require_letters,
    require_numbers,
    require_operation,
    require_replaced,
    require_searched,
)

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_ALLOWANCE: ContextVar[Allowance] = ContextVar("allowance")
# Filters that take long on a long text, or grow in ways of their own; no chat template is known to use them.
_NO_FILTERS = ("pprint", "striptags", "sum", "urlize", "wordwrap", "xmlattr")
# Filters to which a number is a value, and no count or width.
_ANY_NUMBER = frozenset({"d", "default", "float", "int", "replace"})
# Filters that do something with every element before they return one. A text has many, as a list it counts them.
_LOOK_AT_ELEMENTS = frozenset({"groupby", "reject", "rejectattr", "select", "selectattr", "sort", "unique"})
# Methods that compare every letter with every letter that is sought; searches from the front do not.
_SEARCHES = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})
_NO_METHODS = frozenset({"encode", "expandtabs", "striptags", "to_bytes", "translate"})


@contextmanager
def allowance() -> Iterator[Allowance]:
    """The allowance of what is rendered inside. Compiling has none: Jinja would apply filters to constants then, and so
    leaves them to the rendering."""
    token = _ALLOWANCE.set(Allowance())
    try:
        yield _ALLOWANCE.get()
    finally:
        _ALLOWANCE.reset(token)


def bounded_environment(**options: Any) -> ImmutableSandboxedEnvironment:
    """An environment of these ``options``, to be used where there is an ``allowance``. Templates are made of
    ``bounded_tree``."""
    from jinja2.runtime import Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Bounded(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
        concat = staticmethod(_joined)
        made = staticmethod(lambda value: value)  # its calls are counted, as all are
        step = staticmethod(lambda: _ALLOWANCE.get().step())

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            require_operation(operator, left, right)
            return _ALLOWANCE.get().made(super().call_binop(context, operator, left, right))

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            inner = super().wrap_str_format(value)
            if inner is None:
                return None

            def formatted(*values: Any, **named: Any) -> str:
                require_formatted(value.__self__, "{", (*values, *named.values()))
                return inner(*values, **named)

            return formatted

        def call(__self, __context: Any, __obj: Any, *values: Any, **named: Any) -> Any:
            if isinstance(__obj, Macro):
                require_letters(letters_of((values, named)))
            elif isinstance(text := getattr(__obj, "__self__", None), str):
                if __obj.__name__ in _SEARCHES:
                    for sought in (*values, *named.values()):
                        require_searched(text, sought)
                values = _method_arguments(__obj.__name__, text, values)
                require_numbers(values)
            return _counted(super().call(__context, __obj, *values, **named))

    environment = Bounded(**options)
    del environment.globals["lipsum"]
    for name in _NO_FILTERS:
        del environment.filters[name]
    for name, function in environment.filters.items():
        environment.filters[name] = bounded_filter(name, function)
    return environment


def bounded_tree(environment: ImmutableSandboxedEnvironment, source: str) -> nodes.Template:
    """The tree of ``source``, in which every loop asks before each turn, and literals and joined texts are counted."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    def called(name: str, *values: nodes.Expr) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), list(values), [], None, None)

    class Counting(NodeTransformer):
        def visit_For(self, node: nodes.For) -> nodes.For:
            self.generic_visit(node)
            node.body.insert(0, nodes.ExprStmt(called("step")))
            node.test = node.test and nodes.And(called("step"), node.test)
            return node

        def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Call:
            self.generic_visit(node)
            return called("made", node)

        visit_Dict = visit_List

        def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
            self.generic_visit(node)
            return called("made", node) if node.ctx == "load" else node

        def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
            self.generic_visit(node)
            return reduce(lambda left, right: called("made", nodes.Concat([left, right])), node.nodes)

    tree = environment.parse(source)
    Counting().visit(tree)  # the root stays itself
    tree.set_environment(environment)
    return tree


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with what Jinja has noted at it."""
    before = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*values: Any, **named: Any) -> Any:
        first, (value, *others) = values[:before], values[before:]
        if name not in _ANY_NUMBER:
            require_numbers((*others, *named.values()))
        value = _filter_value(name, value, others, named)
        return _counted(function(*first, value, *others, **named))

    return bounded


def _filter_value(name: str, value: Any, others: list[Any], named: dict[str, Any]) -> Any:
    """``value`` of a filter with these arguments; asked before it grows."""
    of = dict(zip(_NAMES.get(name, ()), others, strict=False)) | named
    match name:
        case "replace":
            require_replaced(str(value), str(of.get("old")), str(of.get("new")))
        case "format":
            require_formatted(str(value), "%", (*others, *named.values()))
        case "indent":
            width = of.get("width", 4)
            require_letters(len(str(value).splitlines()) * (len(width) if isinstance(width, str) else int(width)))
        case "join":
            value = _parts(str(of.get("d", "")), value)
        case _ if name in _LOOK_AT_ELEMENTS and value:
            value = _ALLOWANCE.get().made(list(value))
        case "trim":
            require_searched(str(value), of.get("chars"))
    return value


# Names of the arguments behind the value, where _filter_value reads them.
_NAMES = {"replace": ("old", "new"), "indent": ("width",), "join": ("d",), "trim": ("chars",)}


def _method_arguments(name: str, text: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """``values`` for the method ``name`` of ``text``; asked before it grows."""
    if name == "replace" and len(values) > 1:
        require_replaced(text, *values[:2])
    if name == "join" and values:
        return (_parts(text, values[0]), *values[1:])
    return values


def _parts(between: str, parts: Iterable[Any]) -> list[Any]:
    """``parts`` that are about to be joined."""
    listed = list(_ALLOWANCE.get().each(parts))
    require_letters(sum(map(letters_of, listed)) + len(between) * len(listed))
    return listed


def _joined(parts: Iterable[str]) -> str:
    listed = list(parts)
    require_letters(sum(map(len, listed)))
    return _ALLOWANCE.get().made("".join(listed))


def _counted(value: Any) -> Any:
    own = _ALLOWANCE.get()
    return own.each(value) if isinstance(value, Iterator) else own.made(value)
