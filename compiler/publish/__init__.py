"""The bundle as it is written."""
