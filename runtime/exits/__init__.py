"""Early exit: the chain of segments, the policies by which rows leave it, and where they left."""
