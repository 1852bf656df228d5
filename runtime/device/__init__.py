"""Memory of a GPU, and arrays that lie there."""
