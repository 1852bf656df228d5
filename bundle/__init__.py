"""The file format: what is in a bundle's files, read and checked."""
