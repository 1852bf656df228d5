"""The array types that inputs, feeds, runners and answers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
# By name.
Arrays = Mapping[str, Array]
