"""The paper's configurations by name."""
