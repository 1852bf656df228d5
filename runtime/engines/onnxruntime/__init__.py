"""Engines in ONNX Runtime on the CPU."""
