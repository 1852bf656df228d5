"""A command as it runs on a device, which has nothing that compiling needs."""

from __future__ import annotations

# What only a compiling machine has; importing any of it fails here.
PROGRAM = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {"torch", "transformers", "onnx", "onnx_ir", "nestforge.compiler", "nestforge.exporters"}:
            raise ImportError(name + " is not on this device")

sys.meta_path.insert(0, Absent())
from nestforge.tools.cli import main
main()
"""
