"""What every protocol asks of the server."""

from __future__ import annotations

import asyncio

import pytest
from nestforge.serving.app import HEADERS, Limits, Problem, Service
from nestforge.serving.desk import Desk
from starlette.requests import Request
from starlette.types import Message


class Part(bytes):
    """A part of a body that counts how often its size is asked."""

    asked = 0

    def __len__(self) -> int:
        Part.asked += 1
        return super().__len__()


def test_a_body_in_many_parts_is_counted_as_it_comes() -> None:
    left = [Part(b"x") for _ in range(1000)]

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

    async def read() -> None:
        desk = Desk(1, 1)
        request = Request({"type": "http", HEADERS: {}}, receive)
        assert await Service({}, desk, Limits()).body(request) == b"x" * 1000
        assert Part.asked <= 2000  # not once for each that came before
        left.extend(Part(b"x") for _ in range(1000))
        with pytest.raises(Problem, match="at most 10 bytes"):
            await Service({}, desk, Limits(body_bytes=10)).body(request)
        assert len(left) == 989
        desk.close()

    asyncio.run(read())
