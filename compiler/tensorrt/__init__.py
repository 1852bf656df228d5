"""Plans for TensorRT, built on the device from the graphs of a bundle. Needs no torch."""
