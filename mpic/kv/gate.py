"""How far the KV of a chunk that is being loaded has come: what the layers of a step wait for (MPIC, section 4.3)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable


class LayerGate:
    """One load. Loader threads ``open`` layers in order, or ``fail``; the step's thread ``wait``s for single layers.

    Nothing else connects a load and a step, so a device that is filled in another way (a copy stream with an event a
    layer: ``mpic.kv.copies``) needs a subclass whose ``follow`` makes the device wait too, and nothing more.

    Attributes:
        ready: layers ``[0, ready)`` are in place, verified, and will not change.
        failed: the other layers will not come.
        ended: when the last layer came (``time.monotonic``), or 0.
        tired: a step has waited long enough for this load; links wait until it has ended.
    """

    def __init__(self, gates: Gates, layers: int) -> None:
        self._gates, self._layers = gates, layers
        self.ready = 0
        self.failed = False
        self.ended = 0.0
        self.tired = False

    @property
    def complete(self) -> bool:
        return self.ready == self._layers

    @property
    def flowing(self) -> bool:
        """Whether the load has begun to deliver and can still be relied on."""
        return self.ready > 0 and not self.failed and not self.tired

    def open(self, layer: int) -> None:
        """The layer is in place."""
        with self._gates.changed:
            if layer + 1 == self._layers:
                self.ended = time.monotonic()
            self.ready = layer + 1
            self._gates.changed.notify_all()

    def fail(self) -> None:
        """No further layer will come; after the last one this means nothing."""
        with self._gates.changed:
            self.failed = not self.complete
            self._gates.changed.notify_all()

    def wait(self, layer: int, seconds: float) -> bool:
        """Wait until the layer is in place.

        Returns:
            False when it will not come, has not come within ``seconds``, or the engine is being closed: then nothing
            computed over this chunk in this step may be used.
        """
        if layer < self.ready:
            return True
        with self._gates.changed:
            self._gates.changed.wait_for(
                lambda: layer < self.ready or self.failed or self._gates.closed, seconds
            )
            return layer < self.ready

    def follow(self, layer: int) -> None:
        """What the device computes from now on comes after the layer, which is open."""

    def settle(self) -> None:
        """What the device does from now on comes after everything this load has begun to write, also if it failed."""


class Gates:
    """The gates of an engine: closing it wakes whoever waits."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.closed = False

    def new(self, layers: int) -> LayerGate:
        return LayerGate(self, layers)

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class Waits:
    """The loads one step waits for, layer by layer.

    Args:
        gates: of the chunks that the step's rows link.
        patience: seconds the step may wait, all layers together.

    Attributes:
        void: gates that did not open in time. The step runs to its end, because rows do not see each other; what it
            computed for requests that link these chunks is to be thrown away.
    """

    def __init__(self, gates: Iterable[LayerGate], patience: float) -> None:
        self._gates, self._left = set(gates), patience
        self.void: set[LayerGate] = set()

    def __bool__(self) -> bool:
        return bool(self._gates)

    def before(self, layer: int) -> None:
        """Called in every layer before its rows attend."""
        for gate in self._gates - self.void:
            if layer >= gate.ready:
                began = time.monotonic()
                there = gate.wait(layer, max(0.0, self._left))
                self._left -= time.monotonic() - began
                if not there:
                    gate.tired = True
                    self.void.add(gate)
                    continue
            gate.follow(layer)
