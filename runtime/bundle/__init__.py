"""The file format: what stands in a bundle's files, read and checked."""
