"""``nestforge serve`` as a process of its own, with a short time to read requests."""

import contextlib
import json
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

PROGRAM = """
import json, sys
from nestforge.serving import app, server
limits, options = map(json.loads, sys.argv[1:3])
server.serve(server.ServeRequest(sys.argv[3:], port=0, limits=app.Limits(**limits), **options))
"""


def port_for_later() -> int:
    """A free port that no other program is given until a server binds it.

    Linux gives ports from 32768 on to whoever asks for any, Ray those below 20000 to its workers.
    """
    for port in random.sample(range(20_000, 32_768), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError("no free port from 20000 to 32767")


class Running:
    """A server that runs, at ``address`` and over gRPC at ``rpc``."""

    rpc = ""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address
        self.host, port = address.split(":")
        self.port = int(port)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        connection = HTTPConnection(self.host, self.port, timeout=60)
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, raw, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        is_json = (response.getheader("content-type") or "").startswith("application/json")
        return response.status, response.headers, json.loads(content) if is_json else content


@contextlib.contextmanager
def serving(
    *bundles: Path, body_bytes: int = 1 << 20, read_s: float = 0.5, write_s: float = 30.0, **options: Any
) -> Iterator[Running]:
    limits = {"body_bytes": body_bytes, "read_s": read_s, "write_s": write_s}
    arguments = [sys.executable, "-c", PROGRAM, json.dumps(limits), json.dumps({"stop_s": 10.0, **options})]
    arguments += map(str, bundles)
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline()
            found = re.search(r"http://(\S+)$", line.strip())
            assert found, line + process.stderr.read()
            running = Running(process, found[1])
            if "grpc_port" in options:
                running.rpc = process.stderr.readline().strip().rpartition("grpc://")[2]
            yield running
        finally:
            process.kill()
