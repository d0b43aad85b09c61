"""``mpic serve`` whose engine blocks for ever in its next step as soon as there is a FIFO at a given path:
``python stuck_server.py PATH OPTIONS...``."""

from __future__ import annotations

import os
import sys

from mpic.cli import main
from mpic.engine.native.engine import NativeEngine

path = sys.argv[1]
step = NativeEngine.step


def stuck(self: NativeEngine) -> None:
    if os.path.exists(path):
        open(path).close()
    step(self)


NativeEngine.step = stuck
sys.argv = ["mpic", "serve", *sys.argv[2:]]
main()
