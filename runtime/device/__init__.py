"""Hardware of engines: the memory of a device and the cores of the processor."""
