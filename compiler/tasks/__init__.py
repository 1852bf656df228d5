"""Tasks on one frozen model: laid out as engines take them, proven, and added to a bundle."""
