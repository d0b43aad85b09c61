"""What runs next: continuous batching of decodes, prefills and compiles under one token budget.

Admission follows MEPIC, algorithm 1: a request enters when its own pages and those of its missing chunks fit into
free + evictable pages; chunks it shares with others cost nothing. Order is arrival order and nobody overtakes. When
a running request needs a page and there is none, the youngest one gives its pages back and is computed again later;
nothing it has said is lost.
"""

from __future__ import annotations

import time
from bisect import insort
from concurrent.futures import Future
from dataclasses import dataclass

from mpic.engine.native.lanes import CompileLane, Lane, LinkedChunk, Sequence
from mpic.engine.native.room import Room
from mpic.engine.native.runner import Slice
from mpic.engine.native.spans import chunk_spans, map_spans, namespace
from mpic.errors import CompileFailed
from mpic.kv.chunk import ChunkInputs, KVKey
from mpic.kv.device import Resident
from mpic.kv.gate import LayerGate
from mpic.kv.prefix import Node

GROWTH = 256
"""Most tokens reserved ahead for an answer; longer answers grow by moving to a larger extent."""


@dataclass(eq=False)
class CompileRequest:
    """A chunk somebody uploaded; waits in line like a request."""

    key: KVKey
    inputs: ChunkInputs
    future: Future[int]
    arrived: float


class Scheduler:
    """Owns who waits and who runs.

    Args:
        room: what requests and chunks hold.
        budget: most rows a step computes.
        max_running: most requests in one batch.
    """

    def __init__(self, room: Room, budget: int, max_running: int = 64) -> None:
        self.room, self.budget, self.max_running = room, budget, max_running
        self.device, self.pool, self.jobs, self.counters = room.device, room.pool, room.jobs, room.counters
        self.waiting: list[Sequence | CompileRequest] = []  # by arrival
        self.running: list[Sequence] = []  # by arrival
        self.parked: list[Sequence] = []  # preempted while they search; they wait for that outside the line
        self._admitted: list[tuple[CompileRequest, Resident]] = []

    def add(self, item: Sequence | CompileRequest) -> None:
        insort(self.waiting, item, key=lambda i: i.arrived)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.jobs or self.parked)

    def schedule(self) -> list[Slice]:
        """The slices of the next step, at most ``budget`` rows; empty when everything waits for loads or for room."""
        slices: list[Slice] = []
        budget = self._decodes(slices, self.budget)
        budget = self._prefills(slices, budget)
        while budget > 0 and self.waiting:
            item = self.waiting[0]
            if isinstance(item, CompileRequest):
                admitted = self._admit_compile(item)
            else:
                admitted = len(self.running) < self.max_running and self._admit(item)
            if not admitted:
                break
            self.waiting.remove(item)
            budget = self._prefills(slices, budget)
        self.join(slices, budget)
        return slices

    # ---- rows

    def _decodes(self, slices: list[Slice], budget: int) -> int:
        for sequence in list(self.running):
            if budget == 0:
                break
            if (
                sequence not in self.running
                or len(sequence) - sequence.computed != 1
                or not sequence.generated
            ):
                continue
            if not self._ready(sequence, ()) or not self._grow(sequence):
                continue
            slices.append(Slice(sequence, sequence.computed, len(sequence)))
            budget -= 1
        return budget

    def _prefills(self, slices: list[Slice], budget: int) -> int:
        """In order of arrival: a request's chunks that are still to be compiled, then its own rows, as soon as all its
        chunks are ready or will be within this very step. Chunks nobody waits for get what is left of the budget."""
        taken = {id(s.lane) for s in slices}
        finishing = _finishing(slices)

        def schedule(lane: Lane, end: int) -> None:
            nonlocal budget
            hi = min(end, lane.computed + budget)
            if id(lane) in taken or hi == lane.computed:
                return
            slices.append(Slice(lane, lane.computed, hi))
            taken.add(id(lane))
            budget -= hi - lane.computed
            if isinstance(lane, CompileLane) and hi == len(lane):
                finishing.add(lane.resident)

        for sequence in self.running:
            for linked in sequence.needed:
                if linked.resident in self.jobs:
                    schedule(self.jobs[linked.resident], len(self.jobs[linked.resident]))
            if self._ready(sequence, finishing) and not sequence.undecided:
                schedule(sequence, _end(sequence))
        for lane in self.jobs.values():
            schedule(lane, len(lane))
        return budget

    def join(self, slices: list[Slice], budget: int) -> None:
        """Add links whose loads are under way: they run beside them, layer by layer (MPIC, section 4.3).

        A step that waits for a disk makes everything in it wait, so a link joins only

        - when every one of its loads has delivered its first layer, and the other chunks are ready or compiled in this
          very step;
        - when no other request could use the step: none has rows in it, nor chunks that are compiled in it. While
          others compute, loads run beside *their* steps, and the link follows when they have ended;
        - beside another such link only if it waits for no load that the other does not.

        A step waits ``ChunkTraffic.patience`` at most. Then, and when a load fails, it computes on, the rows of the
        links concerned are thrown away, and they are computed again when their chunks are ready.
        """
        if budget == 0 or any(isinstance(s.lane, Sequence) for s in slices):
            return
        compiling = {s.lane.resident for s in slices}
        finishing = _finishing(slices)
        waited: set[LayerGate] = set()
        for sequence in self.running:
            needed = {linked.resident for linked in sequence.needed}
            gates = {r.gate for r in needed if not r.ready and r not in finishing}
            held_up = sequence.undecided or sequence.searching or not self._has_room(sequence)
            if held_up or None in gates or not all(g.flowing or g.complete for g in gates):
                continue
            others = {one.resident for s in self.running if s is not sequence for one in s.needed}
            if budget == 0 or compiling & (others - needed) or (waited and not gates <= waited):
                continue
            hi = min(_end(sequence), sequence.computed + budget)
            slices.append(Slice(sequence, sequence.computed, hi))
            budget -= hi - sequence.computed
            waited |= gates
            self.counters["links_beside_loads"] += 1

    @staticmethod
    def _has_room(sequence: Sequence) -> bool:
        return len(sequence) - sequence.mapped <= sequence.extent.tokens

    def undecided(self) -> list[Sequence]:
        """Running requests that wait for their dynamic policy's decision and have all it needs."""
        return [s for s in self.running if s.undecided and self._ready(s, ())]

    def decided(self, sequence: Sequence) -> None:
        """The plan has been replaced: map what it maps."""
        sequence.spans = map_spans(sequence)

    def _ready(self, sequence: Sequence, finishing: set[Resident] | tuple) -> bool:
        """Whether all chunks are there, or will be before this step's rows look at them."""
        return not sequence.searching and all(
            r.ready or r in finishing or (r.gate is not None and r.gate.complete)
            for r in (linked.resident for linked in sequence.needed)
        )

    # ---- admission

    def _admit(self, sequence: Sequence) -> bool:
        """Reserve pages, pin chunks, map prefixes; all or nothing."""
        path = []
        if sequence.request.policy.prefix:
            path = self.device.prefix.match(namespace(sequence), sequence.items, len(sequence) - 1)
        if self._reserve(sequence, path):
            return True
        self.device.prefix.unpin(path)
        # what a prefix shares its extent with may be larger than what it saves: an idle engine must still admit
        return bool(path) and not self.running and not self.jobs and self._reserve(sequence, [])

    def _reserve(self, sequence: Sequence, path: list[Node]) -> bool:
        mapped = sum(node.own_tokens for node in path)
        reserve = sequence.max_tokens - sequence.generated
        if (
            not sequence.usage.preemptions
        ):  # one that had to make way does not come back to outgrow its room again
            reserve = min(reserve, GROWTH)
        held = self.room.hold(sequence.needed, len(sequence) - mapped + reserve)
        if held is None:
            return False
        extent, added = held
        sequence.path = path
        sequence.extent, sequence.mapped, sequence.computed = extent, mapped, mapped
        first_time = sequence.admitted == 0.0
        sequence.admitted = sequence.admitted or time.monotonic()
        self.room.attach(sequence, sequence.needed, added)
        sequence.spans = map_spans(sequence)
        if first_time:
            sequence.usage.prefix_hit = min(mapped, sequence.prompt_own)
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.arrived)
        return True

    def _admit_compile(self, request: CompileRequest) -> bool:
        if self.room.deletions.key_since(request.arrived, request.key):
            request.future.set_exception(CompileFailed("the chunk was deleted before it was compiled"))
            return True
        resident = self.device.get(request.key)
        if resident is None:
            resident = self.device.add(request.key, request.inputs)
            if resident is None:
                return False
            self.room.start_job(resident)
        self.device.acquire(resident)
        self._admitted.append((request, resident))
        return True

    def take_admitted(self) -> list[tuple[CompileRequest, Resident]]:
        """Compile requests admitted since the last call; each holds its resident."""
        admitted, self._admitted = self._admitted, []
        return admitted

    # ---- growth, preemption, release

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for one more own token; may preempt younger requests, or this one."""
        slots = len(sequence) - sequence.mapped
        if slots <= sequence.extent.tokens:
            return True
        wanted = slots + min(max(sequence.max_tokens - sequence.generated, 1), GROWTH)
        while (bigger := self.pool.alloc(wanted)) is None:
            if self._preempt_youngest() is sequence:
                return False
        self.room.move(sequence, bigger)
        return True

    def resume(self, sequence: Sequence, found: list[LinkedChunk]) -> None:
        """A request has searched and been extended by tokens and chunks (``found``: those it maps): make room for them
        where it runs, preempting younger requests or, at last, this one; it is then prefilled again as a whole."""
        sequence.searching = False
        if sequence in self.parked:
            self.parked.remove(sequence)
            self.add(sequence)
        else:
            while not self._extend(sequence, found):
                if self._preempt_youngest() is sequence:
                    break
        sequence.needed = [*sequence.needed, *found]
        if sequence in self.running:  # what is mapped stays: prefix nodes may have been split since
            sequence.spans += chunk_spans(sequence, found)

    def _extend(self, sequence: Sequence, found: list[LinkedChunk]) -> bool:
        slots = len(sequence) - sequence.mapped
        grows = slots > sequence.extent.tokens
        reserve = min(max(sequence.max_tokens - sequence.generated, 1), GROWTH)
        held = self.room.hold(found, slots + reserve if grows else 0)
        if held is None:
            return False
        bigger, added = held
        if bigger is not None:
            self.room.move(sequence, bigger)
        self.room.attach(sequence, found, added)
        return True

    def _preempt_youngest(self) -> Sequence:
        youngest = self.running[-1]
        self.preempt(youngest)
        return youngest

    def preempt(self, sequence: Sequence) -> None:
        """Give back everything the request holds and queue it again, with what it has generated so far."""
        self.release(sequence)
        sequence.usage.preemptions += 1
        self.counters["preemptions"] += 1
        if sequence.searching:
            self.parked.append(sequence)
        else:
            self.add(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take a request off the device."""
        self.running.remove(sequence)
        self.room.release(sequence)


def _finishing(slices: list[Slice]) -> set[Resident]:
    """Chunks of which the last row is computed in this step."""
    return {s.lane.resident for s in slices if isinstance(s.lane, CompileLane) and s.hi == len(s.lane)}


def _end(sequence: Sequence) -> int:
    """How far a request's rows may go in its next step."""
    end = len(sequence)
    if sequence.request.policy.two_step and sequence.computed < end - 1:
        end -= 1  # the last token goes alone, in a second step
    return end
