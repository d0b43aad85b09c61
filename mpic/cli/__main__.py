"""``python -m mpic.cli``."""

from mpic.cli import main

main()
