"""Values that a process has once per key, made by their first user and closed by their last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """What ``SharedValues`` keeps."""

    def close(self) -> None:
        """Called once, after its last user gave it back."""
        ...


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", bound=Closable)


class SharedValues(Generic[Key, Value]):
    """Every ``take`` is followed by one ``give`` of the same key. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[Key, tuple[Value, int]] = {}

    def take(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of ``key``, by ``make`` where there is none; what that raises is raised."""
        with self._lock:
            value, users = self._users.get(key) or (make(), 0)
            self._users[key] = (value, users + 1)
            return value

    def give(self, key: Key) -> None:
        """Ends one use."""
        with self._lock:
            value, users = self._users.pop(key)
            if users > 1:
                self._users[key] = (value, users - 1)
            else:
                value.close()
