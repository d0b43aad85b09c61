"""Benches that measure what the system promises. ``mpic bench list`` shows them.

To add one: one file with a frozen settings dataclass and a function under ``@bench(...)``, and one row in the
tests' table of tiny settings (``tests/bench_settings.py``).
"""
