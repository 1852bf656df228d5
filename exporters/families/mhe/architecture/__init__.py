"""What the configuration of an MHE model says, without torch: parameters, axes, costs, forms of its attention."""
