"""Engines' graphs and the weight store as bytes, read without onnx."""
