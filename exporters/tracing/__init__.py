"""PyTorch modules to ONNX graphs."""
