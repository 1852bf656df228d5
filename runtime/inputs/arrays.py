"""The array type that inputs, feeds, runners and answers share."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
