"""nestforge: one trained elastic model, one verified engine per device budget."""

__version__ = "0.1.0"
