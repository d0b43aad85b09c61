"""What runs next: continuous batching of decodes, prefills and compiles under one token budget.

Admission follows MEPIC, algorithm 1: a request enters when its own pages and those of its missing chunks fit into
free + evictable pages; chunks it shares with others cost nothing. Order is arrival order and nobody overtakes. When
a running request needs a page and there is none, the youngest one gives its pages back and is computed again later;
nothing it has said is lost.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from mpic.engine.deletions import Deletions
from mpic.engine.native.lanes import CompileLane, Lane, LinkedChunk, MappedSpan, Sequence, compile_lane
from mpic.engine.native.runner import Slice
from mpic.errors import CompileFailed, IntegrityError
from mpic.kv.chunk import ChunkInputs, ChunkKey, KVKey
from mpic.kv.device import DeviceCache, Resident
from mpic.kv.gate import LayerGate
from mpic.kv.pool import Extent
from mpic.kv.prefix import Node, own

GROWTH = 256
"""Most tokens reserved ahead for an answer; longer answers grow by moving to a larger extent."""

PREFETCH = 0.25
"""Most of the pool that may be given to one chunk on suspicion."""


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
        device: resident chunks and prefix cache over the pool.
        budget: most rows a step computes.
        bos: token for sinks.
        load: starts reading a stored chunk into its resident extent, in an order.
        deletions: chunks that requests under way must not bring back.
        max_running: most requests in one batch.
    """

    def __init__(
        self,
        device: DeviceCache,
        budget: int,
        bos: int,
        load: Callable[[LinkedChunk, float], None],
        deletions: Deletions,
        max_running: int = 64,
    ) -> None:
        self.device, self.pool, self.budget, self.bos = device, device.pool, budget, bos
        self.max_running = max_running
        self._load, self._deletions = load, deletions
        self.waiting: list[Sequence | CompileRequest] = []  # by arrival
        self.running: list[Sequence] = []  # by arrival
        self.parked: list[Sequence] = []  # preempted while they search; they wait for that outside the line
        self.jobs: dict[Resident, CompileLane] = {}  # chunks being compiled, in order of admission
        self.counters: Counter[str] = Counter()
        self._admitted: list[tuple[CompileRequest, Resident]] = []

    def add(self, item: Sequence | CompileRequest) -> None:
        insort(self.waiting, item, key=lambda i: i.arrived)

    def forget(self, owner: str, chunk: ChunkKey) -> None:
        """A deleted chunk: requests that came before may still compute it for themselves, but nobody else sees it and
        it is not stored."""
        for key, resident in list(self.device.chunks.items()):
            if (key.owner, key.chunk) == (owner, chunk):
                self.device.drop(resident)
        self.device.prefix.purge((owner, chunk.digest))

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
        held = self._hold(sequence.needed, len(sequence) - mapped + reserve)
        if held is None:
            return False
        extent, added = held
        sequence.path = path
        sequence.extent, sequence.mapped, sequence.computed = extent, mapped, mapped
        first_time = sequence.admitted == 0.0
        sequence.admitted = sequence.admitted or time.monotonic()
        self._attach(sequence, sequence.needed, added)
        sequence.spans = map_spans(sequence)
        if first_time:
            sequence.usage.prefix_hit = min(mapped, sequence.prompt_own)
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.arrived)
        return True

    def _hold(
        self, needed: list[LinkedChunk], tokens: int
    ) -> tuple[Extent | None, dict[LinkedChunk, Resident]] | None:
        """Pin the residents of chunks, add those that are missing, and reserve an extent (none for 0 tokens): all of
        it, or nothing and None."""
        held: list[Resident] = []
        added: dict[LinkedChunk, Resident] = {}

        def hold(resident: Resident) -> None:
            self.device.acquire(resident)
            held.append(resident)

        present = [(linked, self.device.get(linked.key)) for linked in needed]
        for _, resident in present:
            if resident is not None:
                hold(resident)  # before anything is allocated, so that it is not evicted to make room
        extent = self.pool.alloc(tokens) if tokens else None
        fits = extent is not None or not tokens
        for linked, resident in present:
            if not fits or resident is not None:
                continue
            resident = self.device.get(linked.key)  # a chunk linked twice was added a moment ago
            if resident is None:
                resident = self.device.add(linked.key, linked.inputs)
                if resident is None:
                    fits = False
                    continue
                added[linked] = resident
            hold(resident)
        if fits:
            return extent, added
        if extent is not None:
            self.pool.free(extent)
        for resident in held:
            self.device.release(resident)
        for resident in added.values():
            self.device.drop(resident)
        return None

    def _attach(
        self, sequence: Sequence, needed: list[LinkedChunk], added: dict[LinkedChunk, Resident]
    ) -> None:
        """Give chunks the residents that are held for them, and have those that were added read or compiled."""
        for linked in needed:
            linked.resident = self.device.get(linked.key)
            first_time = linked.tier == "none"
            if linked in added:
                if linked.stored is not None:
                    linked.tier = linked.stored.tier
                    self._load(linked, sequence.arrived)
                else:
                    linked.tier = "compiled"
                    self.start_job(linked.resident)
            elif first_time:
                making = "compiled" if linked.resident in self.jobs else "disk"
                linked.tier = "device" if linked.resident.ready else making
            if first_time:
                self.device.counters["chunk_requests"] += 1
                self.device.counters["chunk_hits"] += linked.tier == "device"
                self.device.counters[f"chunks_from_{linked.tier}"] += 1
        for linked, resident in added.items():
            if self._deletions.key_since(sequence.arrived, linked.key):
                self.device.drop(resident)

    def prefetch(self, linked: LinkedChunk, arrived: float) -> None:
        """Start reading a stored chunk that nobody links yet, if at most ``PREFETCH`` of the pool is needed for it."""
        resident = self.device.get(linked.key)
        pages = self.pool.pages_for(len(linked.inputs) + linked.key.recipe.sink)
        if resident is not None or pages > self.pool.pages * PREFETCH:
            return
        if self._deletions.key_since(arrived, linked.key):
            return
        linked.resident = self.device.add(linked.key, linked.inputs)
        if linked.resident is not None:
            self.counters["prefetched"] += 1
            self._load(linked, arrived)

    def start_job(self, resident: Resident) -> None:
        """Compile a resident chunk; the job holds it until it is ready."""
        lane = compile_lane(resident.inputs, resident.first, self.bos)
        lane.extent, lane.resident = resident.extent, resident
        self.device.acquire(resident)
        self.jobs[resident] = lane

    def _admit_compile(self, request: CompileRequest) -> bool:
        if self._deletions.key_since(request.arrived, request.key):
            request.future.set_exception(CompileFailed("the chunk was deleted before it was compiled"))
            return True
        resident = self.device.get(request.key)
        if resident is None:
            resident = self.device.add(request.key, request.inputs)
            if resident is None:
                return False
            self.start_job(resident)
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
        self._move(sequence, bigger)
        return True

    def _move(self, sequence: Sequence, bigger: Extent) -> None:
        """Let a request's own tokens go on in a larger extent."""
        used = sequence.computed - sequence.mapped
        old, new = self.pool.view(sequence.extent), self.pool.view(bigger)
        new[:, :, :, :used] = old[:, :, :, :used]
        self.pool.free(sequence.extent)
        sequence.extent = bigger

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
        held = self._hold(found, slots + reserve if grows else 0)
        if held is None:
            return False
        bigger, added = held
        if bigger is not None:
            self._move(sequence, bigger)
        self._attach(sequence, found, added)
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
        """Take a request off the device: free its extent, unpin its chunks and prefixes."""
        self.running.remove(sequence)
        for linked in sequence.needed:
            self.device.release(linked.resident)
            linked.resident = None
        self.device.prefix.unpin(sequence.path)
        sequence.path = []
        if sequence.extent is not None:
            self.pool.free(sequence.extent)
            sequence.extent = None
        sequence.spans, sequence.mapped, sequence.computed = [], 0, 0

    def remember(self, sequence: Sequence) -> None:
        """Enter a finished request's own tokens into its prefix namespace, unless a chunk they were computed over has
        been deleted meanwhile."""
        deleted = any(self._deletions.key_since(sequence.arrived, linked.key) for linked in sequence.linked)
        if deleted or any(node.dead for node in sequence.path):
            return
        known = [i for i, item in enumerate(sequence.items) if own(item)]
        end = known[sequence.computed - 1] + 1 if sequence.computed else 0
        chunks = frozenset((linked.key.owner, linked.key.chunk.digest) for linked in sequence.linked)

        def take(n: int) -> Extent | None:
            at, used = n - sequence.mapped, sequence.computed - sequence.mapped
            if at == 0 and self.pool.pages_for(used) == sequence.extent.pages:
                extent, sequence.extent = sequence.extent, None
                return extent
            if at < 0:
                raise IntegrityError("a request's prefix nodes are no longer found")
            kept = self.pool.alloc(used - at)
            if kept is not None:
                self.pool.view(kept)[:] = self.pool.view(sequence.extent)[:, :, :, at:used]
            return kept

        self.device.prefix.insert(namespace(sequence), sequence.items[:end], chunks, take)


def _finishing(slices: list[Slice]) -> set[Resident]:
    """Chunks of which the last row is computed in this step."""
    return {s.lane.resident for s in slices if isinstance(s.lane, CompileLane) and s.hi == len(s.lane)}


def _end(sequence: Sequence) -> int:
    """How far a request's rows may go in its next step."""
    end = len(sequence)
    if sequence.request.policy.two_step and sequence.computed < end - 1:
        end -= 1  # the last token goes alone, in a second step
    return end


def namespace(sequence: Sequence) -> tuple[str, ...]:
    """Exact KV of a user, or what a user linked under one policy (and so one recipe); never found through the other."""
    policy, user = sequence.request.policy, sequence.request.user
    return ("exact", user) if policy.exact else ("linked", user, policy.name)


def map_spans(sequence: Sequence) -> list[MappedSpan]:
    """Where the request's rows find what they do not compute: its prefix nodes at base 0, then its chunks. To be asked
    when the nodes have just been matched: one that is split later is only the rest of what was mapped."""
    spans = [
        MappedSpan(node.shared.extent, node.lo, node.lo + node.own_tokens, 0, 0)
        for node in sequence.path
        if node.own_tokens
    ]
    return spans + chunk_spans(sequence, sequence.needed)


def chunk_spans(sequence: Sequence, chunks: list[LinkedChunk]) -> list[MappedSpan]:
    """Where the request's rows find what its plan maps of some of its chunks."""
    spans, last = [], sequence.prompt_own - 1
    wanted = {id(linked) for linked in chunks}
    for span in sequence.plan.spans:
        linked = sequence.linked[span.chunk]
        if id(linked) not in wanted:
            continue
        first, sink = linked.resident.first, linked.key.recipe.sink
        row = last if sequence.request.policy.two_step else span.row
        spans.append(
            MappedSpan(linked.resident.extent, first + span.lo, first + span.hi, span.base - sink, row)
        )
    return spans
