"""Attacks and accidents, seeded and bounded: damaged files, kills, threads.

A *driver* is a module with ``open_driver(folder) -> Callable[[int], Result]``: the returned function tries the input of
one seed, in the process that calls it, and says what came of it. ``drive.py`` runs seeds in a worker process that may
crash, hang or take too much memory without taking the test with it, and counts outcomes. ``python -m hostile DRIVER``
(with ``tests`` on the path) is the long run; ``--seed N --count 1`` is one input again.
"""
