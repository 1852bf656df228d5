"""Forms of attention whose heads share their projections."""
