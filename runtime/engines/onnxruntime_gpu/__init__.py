"""Engines in ONNX Runtime on a GPU."""
