"""Rows that leave early."""
