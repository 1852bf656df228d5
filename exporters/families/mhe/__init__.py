"""MHE attention (arXiv 2310.07911): heads that share their projections. See docs/mhe.md."""
