"""What engines run on: the memory of a device and the cores of the processor."""
