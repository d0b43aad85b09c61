"""Make the layers of a step wait for the chunks that are loaded meanwhile, layer by layer. MPIC (section 4.3) loads
and computes in parallel, and calls layer-wise transfer orthogonal to that."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable


class LoadProgress:
    """The progress of loading one chunk: the number of its layers that are in place.

    Loader threads report layers in order with ``arrive``, or ``fail``; the step's thread ``wait``s for single layers.
    Nothing else connects a load and a step. A device that is filled in another way (a copy stream with one event per
    layer: ``mpic.kv.copies``) only needs a subclass whose ``follow`` makes the device wait too.

    Attributes:
        ready: layers ``[0, ready)`` are in place, verified, and do not change any more.
        failed: the other layers will not arrive.
        ended: time at which the last layer arrived (``time.monotonic``), or 0.
        tired: a step has waited too long for this load; links no longer follow it, but wait until it has ended.
    """

    def __init__(self, signal: LoadSignal, layers: int) -> None:
        self._signal, self._layers = signal, layers
        self.ready = 0
        self.failed = False
        self.ended = 0.0
        self.tired = False

    @property
    def complete(self) -> bool:
        return self.ready == self._layers

    @property
    def flowing(self) -> bool:
        """True from the first layer on, unless the load has failed or made a step wait too long."""
        return self.ready > 0 and not self.failed and not self.tired

    def arrive(self, layer: int) -> None:
        """Report that the layer is in place."""
        with self._signal.changed:
            if layer + 1 == self._layers:
                self.ended = time.monotonic()
            self.ready = layer + 1
            self._signal.changed.notify_all()

    def fail(self) -> None:
        """Report that no further layer will arrive. After the last layer this does nothing."""
        with self._signal.changed:
            self.failed = not self.complete
            self._signal.changed.notify_all()

    def wait(self, layer: int, seconds: float) -> bool:
        """Wait until the layer is in place.

        Returns:
            False when it will not arrive, has not arrived within ``seconds``, or the engine is being closed: then
            nothing computed over this chunk in this step may be used.
        """
        if layer < self.ready:
            return True
        with self._signal.changed:
            self._signal.changed.wait_for(
                lambda: layer < self.ready or self.failed or self._signal.closed, seconds
            )
            return layer < self.ready

    def follow(self, layer: int) -> None:
        """Make the device's further work wait for the layer, which has arrived."""

    def settle(self) -> None:
        """Make the device's further work wait for everything this load has begun to write, even if it failed."""


class LoadSignal:
    """The condition variable that all loads of an engine notify. Closing it wakes every step that waits."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.closed = False

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class LayerBarrier:
    """Makes each layer of one step wait for the same layer of the loads that the step's rows link.

    Args:
        loads: the loads of the chunks that the step's rows link.
        patience: seconds the step may wait, all layers together.

    Attributes:
        missed: loads that did not deliver in time. The step runs to its end, because rows do not see each other; what
            it computed for requests that link these chunks is thrown away.
    """

    def __init__(self, loads: Iterable[LoadProgress], patience: float) -> None:
        self._loads, self._left = set(loads), patience
        self.missed: set[LoadProgress] = set()

    def wait(self, layer: int) -> None:
        """Wait for one layer of every load. Called in every layer before its rows attend."""
        for load in self._loads - self.missed:
            if layer >= load.ready:
                began = time.monotonic()
                arrived = load.wait(layer, max(0.0, self._left))
                self._left -= time.monotonic() - began
                if not arrived:
                    load.tired = True
                    self.missed.add(load)
                    continue
            load.follow(layer)
