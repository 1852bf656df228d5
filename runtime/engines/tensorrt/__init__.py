"""Engines that are TensorRT plans."""
