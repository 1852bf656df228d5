"""YAML of outside origin: safe, without aliases and repeated keys."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ..outside import is_of_library, said_by

MAX_YAML_BYTES = 256 * 1024


def parse_yaml(raw: bytes | str, path: Path, error: Callable[[str], Exception]) -> object:
    """Data in ``raw``, read of ``path``. Raises ``error(message)``."""
    try:
        return yaml.load(raw, Loader=_StrictLoader)  # noqa: S506  (_StrictLoader is a SafeLoader)
    except BaseException as failure:  # explicit tags raise whatever int(), tables and matches do
        if not is_of_library(failure):
            raise
        raise error(f"{path}: not a readable YAML file ({_said(failure)})") from failure


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML without aliases (which can expand without bound) and without repeated keys (where one is lost)."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave it bare
            raise yaml.constructor.ConstructorError(
                None, None, f"aliases are not allowed (*{event.anchor})", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain name", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _said(failure: BaseException) -> str:
    if isinstance(failure, yaml.MarkedYAMLError) and failure.problem_mark:
        mark = failure.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {failure.problem}"
    return said_by(failure)
