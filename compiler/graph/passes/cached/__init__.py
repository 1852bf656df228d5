"""Passes for engines that keep a cache: a step of one token costs as much by its nodes as by its products."""
