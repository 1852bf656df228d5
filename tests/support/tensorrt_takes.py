"""TensorRT's parser takes what a family emits: asked of graphs that tests of families make anyway."""

from __future__ import annotations

from pathlib import Path

from nestforge.compiler.tensorrt.graphs import accepted


def assert_tensorrt_takes(folder: Path) -> None:
    """Every graph in ``folder``: operators, types and shapes, by the parser's own table. Raises BuildError."""
    graphs = sorted(folder.glob("*.onnx"))
    assert graphs
    for graph in graphs:
        accepted(graph.name, graph.read_bytes())
