"""Thresholds for a budget, found on the deployed engines."""
