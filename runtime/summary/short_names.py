"""Labels in the place of ids, which grow with every layer that differs; a table of its own says which is which."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...bundle.manifest import Manifest
from .table import Table


class ShortNames:
    """Called with a text: the same with every submodel's id as its label, ``M+2@b1-s128`` of an engine's too."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        ids = "|".join(re.escape(name) for name in sorted(labels, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<![\w-])(?:{ids or '(?!)'})(?![\w-])")

    @staticmethod
    def of(manifest: Manifest) -> ShortNames:
        return ShortNames({entry.id: entry.label for entry in manifest.submodels})

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._labels[found[0]], text)

    @property
    def ids(self) -> Table:
        """One row a submodel: its label and its id."""
        return Table(["submodel", "id"], [[label, name] for name, label in self._labels.items()])
