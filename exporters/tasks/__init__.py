"""Folders of tasks on a frozen model: what they hold."""
