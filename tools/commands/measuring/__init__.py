"""Commands that measure: hosts, engines, and what submodels keep."""
