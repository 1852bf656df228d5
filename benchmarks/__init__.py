"""Benchmarks: each figure beside its bar and beside the alternative, measured in the same run."""
