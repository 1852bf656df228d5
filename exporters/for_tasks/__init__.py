"""A model opened for tasks: its engines take their tensors as inputs."""
