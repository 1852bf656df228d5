"""A sandbox whose templates end: in each rendering, what they compute and make counts against an allowance.

Every loop, call, filter, operator and literal of a template asks it, by the hooks that Jinja has and by what is put
into a template's tree. A result that may outgrow its operands is requested before it is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce, wraps
from itertools import chain
from time import thread_time
from typing import TYPE_CHECKING, Any, TypeVar

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


MOST_SECONDS = 5.0
# Letters of one value, or of the prompt. The longest contexts of language models have a few million letters.
MOST_LETTERS = 2**22
# Letters of all values that are made, kept or not.
MOST_LETTERS_IN_ALL = 2**27
_LETTERS_OF_ELEMENT = 16
_MOST_BITS = 2**12

Value = TypeVar("Value")
# Fields of the two kinds of formats, those whose width is a value itself, and numbers by their first digits. None tries
# a text of n letters in n ways, which would take hours of a long one.
_FIELD = {"%": re.compile(r"%(?:\([^()]*\))?[#0\- +]*[\d*.]*"), "{": re.compile(r"\{[^{}]*")}
_WIDTH_OF_VALUE = {"%": re.compile(r"%(?:\([^()]*\))?[#0\- +\d.]*\*"), "{": re.compile(r"\{[^{}:]*:[^{}]*\{")}
_NUMBER = re.compile(r"0*(\d{1,9})\d*")
# A width in the format of a date, behind its flags, by its first digits.
_DATE_WIDTH = re.compile(r"%[_\-^#+0]*(\d{1,9})")


class Allowance:
    """The allowance of one rendering, in one thread. Every method raises ValueError for what is beyond it."""

    def __init__(self) -> None:
        self._end = thread_time() + MOST_SECONDS
        self._left = MOST_LETTERS_IN_ALL

    def step(self) -> bool:
        """To be asked in every loop; True, so that it may stand in a condition."""
        if thread_time() > self._end:
            raise ValueError(f"it takes more than {MOST_SECONDS:g} s of the processor")
        return True

    def made(self, value: Value) -> Value:
        """``value``, which the template made."""
        self.step()
        size = require_letters(letters_of(value))
        self._left -= size
        if self._left < 0:
            raise ValueError(f"it makes more than {MOST_LETTERS_IN_ALL} letters in all")
        return value

    def each(self, values: Iterable[Value]) -> Iterator[Value]:
        """``values``, each made when it is requested."""
        for value in values:
            yield self.made(value)


def letters_of(value: object) -> int:
    """The size of ``value``. Raises ValueError for a whole number of more digits than any text needs."""
    return _letters_of(value, {})


def require_letters(count: int) -> int:
    """``count`` of a value that is there, or is about to be made. Raises ValueError for too many."""
    if count > MOST_LETTERS:
        raise ValueError(f"it makes a value of {count} letters, more than {MOST_LETTERS}")
    return count


def require_numbers(values: Iterable[object]) -> None:
    """Raises ValueError for a whole number among arguments that a text may not be as long as."""
    for value in values:
        if isinstance(value, int) and abs(value) > MOST_LETTERS:
            raise ValueError(f"it asks for {value:.3g} of something, more than {MOST_LETTERS}")


def require_replaced(text: str, old: object, new: object) -> None:
    """Raises ValueError where ``text`` with every ``old`` as ``new`` would be too long."""
    if isinstance(old, str) and isinstance(new, str):
        require_letters(len(text) + text.count(old) * len(new))


def require_searched(text: str, sought: object) -> None:
    """Raises ValueError where it would take too long to compare every letter of ``text`` with each of ``sought``."""
    if isinstance(sought, str) and len(text) * len(sought) > MOST_LETTERS_IN_ALL:
        raise ValueError(f"it looks for {len(sought)} letters in {len(text)}, which takes too long")


def require_formatted(text: str, mark: str, values: Iterable[object]) -> None:
    """Raises ValueError where ``text``, whose fields begin with ``mark`` ("%" or "{"), may get too long by widths or
    ``values``."""
    if _WIDTH_OF_VALUE[mark].search(text.replace("{{", "")):
        raise ValueError("it formats by a width that is a value; expected a number in the format")
    fields = _FIELD[mark].findall(text)
    widest = max((int(number) for field in fields for number in _NUMBER.findall(field)), default=0)
    require_letters(len(text) + len(fields) * (widest + sum(map(letters_of, values))))


def require_dated(text: str) -> None:
    """Raises ValueError where a date in the format ``text`` may get too long by the widths of its fields."""
    require_letters(len(text) + sum(map(int, _DATE_WIDTH.findall(text))))


def require_operation(operator: str, left: Any, right: Any) -> None:
    """Raises ValueError where ``left operator right`` may get too large."""
    if operator == "%" and isinstance(left, str):
        require_formatted(left, "%", [right])
    elif operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(other, int):
                require_letters(letters_of(one) * other)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _require_bits(left.bit_length() * right)


def _require_bits(count: int) -> None:
    if count > _MOST_BITS:
        raise ValueError(f"it makes a number of more than {_MOST_BITS} bits")


def _letters_of(value: object, known: dict[int, int]) -> int:
    """``known``: the sizes of lists and the like that were met, by identity."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        _require_bits(value.bit_length())
    if not isinstance(value, list | tuple | dict):
        return 1
    if id(value) not in known:
        parts: Iterable[object] = chain(value, value.values()) if isinstance(value, Mapping) else value
        known[id(value)] = sum(_LETTERS_OF_ELEMENT + _letters_of(part, known) for part in parts)
    return known[id(value)]
