"""The scheduler: continuous batching of decodes, prefills and compile jobs under one token budget.

Admission follows MEPIC, algorithm 1: a request enters when its own pages and those of its missing chunks fit into free
and evictable pages; chunks that it shares with others cost nothing. A user's requests are admitted in order of arrival,
and users take turns (``turns.py``). When a running request needs a page and there is none, or a user's turn has come
and there is no room, the youngest one of the user who holds most is preempted: it gives its pages back and is computed
again later. Nothing that it has generated is lost.

A request whose answer nobody reads computes nothing (``DeltaStream.full``). It keeps its memory as long as nobody else
wants it, and is preempted before any other.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from mpic.engine.native.batch import BatchSlice, CompileJob, CompileRequest
from mpic.engine.native.device_memory import DeviceMemory
from mpic.engine.native.pace import StepPace
from mpic.engine.native.request import LinkedChunk, Request, Status
from mpic.engine.native.transfers import LoadEnded
from mpic.engine.native.turns import TRIED, Turns
from mpic.kv.barrier import LoadProgress
from mpic.kv.device import Resident
from mpic.kv.prefix import Node

GROWTH = 256
"""Most tokens reserved ahead for an answer, four times as many after each of its preemptions; longer answers grow by
moving to a larger extent."""


class Scheduler:
    """Decides which requests wait and which run. All methods run on the engine's thread.

    Args:
        budget: maximum number of rows that a step computes.
        max_running: maximum number of requests in one batch.

    ``counters``: ``preemptions``, ``links_beside_loads``.
    """

    def __init__(self, memory: DeviceMemory, budget: int, max_running: int = 64) -> None:
        self.memory, self.budget, self.max_running = memory, budget, max_running
        self.device, self.jobs = memory.device, memory.jobs
        self.counters: Counter[str] = Counter()
        self.pace = StepPace()
        self.turns = Turns(max_running, memory.pool.pages)
        self.waiting: list[Request | CompileRequest] = []  # the queue, by arrival
        self.tried: Request | CompileRequest | None = None  # what could not be admitted last
        self.blocked = False  # something that waits has been tried and did not fit
        self.running: list[Request] = []  # admitted, by arrival
        self.preempted: list[Request] = []  # while they search or nobody reads them; they are in no queue
        self._slices: list[BatchSlice] = []  # of the step that is being scheduled

    def add(self, item: Request | CompileRequest) -> None:
        """Add a request or an upload to the queue."""
        insort(self.waiting, item, key=lambda i: i.arrived)
        self.turns.queue(item)

    def withdraw(self, item: Request | CompileRequest) -> None:
        """Remove a request or an upload from the queue."""
        self.waiting.remove(item)
        self.turns.leave_queue(item)

    def queued(self) -> Counter[str]:
        """Return how many requests of each user wait for their turn or for their reader, without memory. May be called
        from any thread."""
        unread = [request.user for request in list(self.preempted) if request.status is Status.UNREAD]
        return Counter(self.turns.waiting()) + Counter(unread)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.jobs or self.preempted)

    def schedule(self) -> list[BatchSlice]:
        """Return the slices of the next step, at most ``budget`` rows, and fewer while answers stream; an empty list
        when everything waits."""
        self._slices = []
        try:
            return self._schedule(self._slices)
        finally:
            self._slices = []  # a request that is preempted later has no part in it

    def _schedule(self, slices: list[BatchSlice]) -> list[BatchSlice]:
        self.tried = None
        budget = self._decodes(slices, self.budget)
        if len(slices) == len(self.running) and not (self.waiting or self.jobs):
            self.blocked = False  # all decode, as in most steps
            return slices
        if slices:
            budget = self.pace.limit(budget)
        wanted = self._wanted(slices)
        if budget > 0:
            self.blocked = self._admissions(wanted, budget)
        self.blocked = self.blocked and bool(self.waiting)
        rest = budget
        for user, rows in self.turns.level(wanted, budget).items() if wanted else ():
            rest -= self._prefills(slices, min(rows, rest), user)
        self._follow_loads(slices, rest)
        return slices

    # ---- rows

    def _decodes(self, slices: list[BatchSlice], budget: int) -> int:
        for request in list(self.running):
            if budget == 0:
                break
            tokens = len(request)
            decodes = request.generated and tokens - request.computed == 1
            if not (decodes and request.goes_on):  # another request may have preempted it
                continue
            if self._chunks_ready(request) and self._grow(request):
                slices.append(BatchSlice(request, tokens - 1, tokens))
                budget -= 1
        return budget

    def _wanted(self, slices: list[BatchSlice]) -> dict[str, int]:
        """Return how many rows of prompts and uploads a step could compute for each user."""
        wanted: dict[str, int] = {}
        if len(slices) == len(self.running) and not self.jobs:
            return wanted
        taken, jobs = {id(s.rows) for s in slices}, set(self.jobs)
        for request in self.running:
            if id(request) not in taken:
                self._want(wanted, request, jobs)
        for resident in jobs:
            job = self.jobs[resident]
            _add(wanted, job.user, len(job) - job.computed)
        return wanted

    def _want(self, wanted: dict[str, int], request: Request, jobs: set[Resident]) -> None:
        """Add the rows that a step could compute for a request.

        Args:
            jobs: chunks that are being compiled and have not been counted yet; those of the request are removed.
        """
        rows, computable = 0, request.goes_on
        for resident in {linked.resident for linked in request.prompt.needed}:
            if resident in self.jobs:
                if resident in jobs:
                    jobs.remove(resident)
                    rows += len(self.jobs[resident]) - self.jobs[resident].computed
            elif not resident.is_there:
                computable = False
        _add(wanted, request.user, rows + (_end(request) - request.computed if computable else 0))

    def _prefills(self, slices: list[BatchSlice], budget: int, user: str) -> int:
        """Schedule a user's rows in order of arrival: a request's chunks that are still to be compiled, then its own
        rows, as soon as all its chunks are ready or will be within this very step. Other chunks get the rest of the
        budget. Return how many rows it has taken."""
        taken = {id(s.rows) for s in slices}
        finishing = _finishing(slices)
        given = budget

        def schedule(rows: Request | CompileJob, end: int) -> None:
            nonlocal budget
            hi = rows.cut(min(end, rows.computed + max(budget, 0)))
            if id(rows) in taken or hi == rows.computed:
                return
            slices.append(BatchSlice(rows, rows.computed, hi))
            taken.add(id(rows))
            budget -= hi - rows.computed
            finishing.update(_finishing(slices[-1:]))
            self.turns.computed(user, rows, hi)

        for request in self.running:
            if request.user != user:
                continue
            for linked in request.prompt.needed if self.jobs else ():
                if linked.resident in self.jobs:
                    schedule(self.jobs[linked.resident], len(self.jobs[linked.resident]))
            if id(request) in taken:  # it decodes
                continue
            if request.goes_on and self._chunks_ready(request, finishing):
                schedule(request, _end(request))
        for job in self.jobs.values():
            if job.user == user:
                schedule(job, len(job))
        return given - budget

    def _follow_loads(self, slices: list[BatchSlice], budget: int) -> None:
        """Add links whose loads are under way: they run beside them, layer by layer.

        A step that waits for a disk makes everything in it wait, so a link joins only

        - when every one of its loads has delivered its first layer, and the other chunks are ready or compiled in this
          very step;
        - when no other request could use the step: none has rows in it, nor chunks that are compiled in it. While
          others compute, loads run beside *their* steps, and the link follows when they have ended;
        - beside another such link only if it waits for no load that the other does not.

        A step waits ``Transfers.patience`` at most. Then, and when a load fails, it computes on, the rows of the
        links concerned are thrown away, and they are computed again when their chunks are ready.
        """
        if budget <= 0 or any(isinstance(s.rows, Request) for s in slices):
            return
        compiling = {s.rows.resident for s in slices if isinstance(s.rows, CompileJob)}
        finishing = _finishing(slices)
        followed: set[LoadProgress] = set()
        for request in self.running:
            needed = {linked.resident for linked in request.prompt.needed}
            loads = {r.progress for r in needed if not r.ready and r not in finishing}
            fits = len(request) - request.mapped <= request.extent.tokens
            if not (fits and request.goes_on):
                continue
            if None in loads or not all(load.flowing or load.complete for load in loads):
                continue
            others = {c.resident for r in self.running if r is not request for c in r.prompt.needed}
            if budget <= 0 or compiling & (others - needed) or (followed and not loads <= followed):
                continue
            hi = request.cut(min(_end(request), request.computed + budget))
            slices.append(BatchSlice(request, request.computed, hi))
            budget -= hi - request.computed
            followed |= loads
            self.counters["links_beside_loads"] += 1

    @staticmethod
    def _chunks_ready(request: Request, finishing: AbstractSet[Resident] = frozenset()) -> bool:
        """Return whether all chunks are ready, or will be before this step's rows attend to them."""
        return all(c.resident.is_there or c.resident in finishing for c in request.prompt.needed)

    # ---- admission

    def _admissions(self, wanted: dict[str, int], budget: int) -> bool:
        """Admit what waits, in turn, as long as there are rows in the step for it. An item that does not fit is
        overtaken by those of other users alone, and by nobody while what has been preempted for it comes free. Return
        whether there was such an item.

        Args:
            wanted: what ``_wanted`` has returned; rows of what is admitted are added.
        """
        blocked = False
        over: set[str] = set()  # users whose turn is over
        while len(over) < TRIED and (item := self.turns.next(over)) is not None:
            if wanted.get(item.user, 0) >= budget:
                over.add(item.user)
            elif not self._admit(item, wanted):
                if unread := self._unread():
                    self.preempt(unread[-1])
                    continue
                blocked = True
                room = self._room_for(item)
                if room is None:
                    over.add(item.user)
                    continue
                for request in room:
                    self.preempt(request)
                if not (room and self._admit(item, wanted)):
                    break
        return blocked

    def _admit(self, item: Request | CompileRequest, wanted: dict[str, int]) -> bool:
        """Admit something from the queue, if it fits."""
        self.tried = item
        if isinstance(item, Request):
            if len(self.running) >= self.max_running or not self._admit_request(item):
                return False
            self._want(wanted, item, set(self.jobs))
        else:
            if not self.memory.admit(item):
                return False
            self.withdraw(item)
            job = self.jobs.get(self.device.get(item.key))
            _add(wanted, item.user, len(job) - job.computed if job else 0)
        self.tried = None
        return True

    def _room_for(self, item: Request | CompileRequest) -> list[Request] | None:
        """Return the requests of other users that have to be preempted for an item to fit; None if that is not its
        user's right or not enough."""
        if isinstance(item, Request):
            chunks, tokens = item.prompt.needed, len(item) + self._reserved(item)
        else:
            chunks, tokens = [item], 0
        chosen: list[Request] = []

        def fits(n: int) -> bool:
            places = isinstance(item, CompileRequest) or len(self.running) - n < self.max_running
            return places and self.memory.would_fit(chunks, tokens, chosen[:n])

        for request in self.turns.room_for(item, self.memory.pages_for(chunks, tokens)):
            chosen.append(request)
            if len(chosen).bit_count() == 1 and fits(
                len(chosen)
            ):  # looked at seldom: it goes through the caches
                break
        else:
            if not (chosen or self.turns.others_wait(item.user)) or not fits(len(chosen)):
                return None
        return chosen[: next(n for n in range(len(chosen) + 1) if fits(n))]

    def _admit_request(self, request: Request) -> bool:
        path = []
        if request.prompt.plan.prefix:
            path = self.device.prefix.match(request.namespace, request.items, len(request) - 1)
        if self._reserve(request, path):
            return True
        self.device.prefix.unpin(path)
        # the extent that holds a prefix may be larger than the prefix itself: an idle engine must still admit
        return bool(path) and not self.running and not self.jobs and self._reserve(request, [])

    def _reserve(self, request: Request, path: list[Node]) -> bool:
        """Reserve pages, pin chunks and map prefixes: all or nothing."""
        mapped = sum(node.own_tokens for node in path)
        reserve = self._reserved(request)
        request.path = path
        try:
            fits, request.extent = self.memory.reserve(
                request.prompt.needed, len(request) - mapped + reserve, request.arrived
            )
            if fits:
                request.mapped = request.computed = mapped
                request.map()
        except BaseException:
            self.memory.release(request)  # it still waits
            raise
        if not fits:
            request.path = []
            return False
        request.become(Status.DECIDING if request.prompt.undecided else Status.RUNNING)
        if not request.times.admitted:
            request.times.admitted = time.monotonic()
            request.usage.prefix_hit = min(mapped, request.own_prompt)
        self.withdraw(request)
        insort(self.running, request, key=lambda r: r.arrived)
        self.turns.run(request)
        return True

    @staticmethod
    def _reserved(request: Request) -> int:
        """Return how many tokens are reserved for what a request may still generate."""
        # A request that was preempted should not soon be again, and need not keep others out: it comes back when more
        # is free than it had. One that runs alone preempts itself when the pool cannot hold it twice for a move. It
        # then gets all that is left and moves no more, so it ends, and so does the next.
        if request.outgrew:
            return request.left
        return min(request.left, GROWTH << 2 * request.usage.preemptions)

    def undecided(self) -> list[Request]:
        """Return the requests that wait for their dynamic policy's decision and whose chunks are ready for it."""
        return [r for r in self.running if r.status is Status.DECIDING and self._chunks_ready(r)]

    def decided(self, request: Request) -> None:
        """Make a request run after its plan has been decided."""
        request.map()
        request.become(Status.RUNNING)

    def load_ended(self, event: LoadEnded) -> None:
        """Record where a chunk was read from, or why it is compiled, for every request that links it."""
        now = time.monotonic()
        for request in self.running:
            for linked in request.prompt.needed:
                if linked.resident is not event.resident:
                    continue
                if event.reason is not None:
                    linked.tier, linked.reason = event.tier, event.reason
                    continue
                request.times.ready = now
                if linked.tier == "disk":  # it arrived while the chunk was being loaded for another request
                    linked.tier = event.tier

    # ---- growth, preemption, removal

    def _grow(self, request: Request, found: Sequence[LinkedChunk] = ()) -> bool:
        """Reserve memory for additional tokens and chunks of an admitted request. The youngest requests of whoever
        holds most are preempted for it, which may be this request itself; then the method returns False."""
        while not self._fit(request, found):
            unread = [one for one in self._unread() if one is not request]
            last = unread[-1] if unread else self.turns.most()
            self.preempt(last)
            if last is request:
                request.outgrew = not self.running
                return False
        return True

    def _unread(self) -> list[Request]:
        """Return the running requests whose answers nobody reads."""
        return [one for one in self.running if one.status is Status.RUNNING and one.stream.full]

    def _fit(self, request: Request, found: Sequence[LinkedChunk]) -> bool:
        slots, tokens = len(request) - request.mapped, 0
        if slots > request.extent.tokens:
            tokens = slots + min(max(request.left, 1), GROWTH)
        elif not found:
            return True
        fits, bigger = self.memory.reserve(found, tokens, request.arrived)
        self.turns.moved(request)
        if bigger is not None:
            self.memory.move(request, bigger)
        return fits

    def resume(self, request: Request, found: list[LinkedChunk]) -> None:
        """Resume a request after its search and its extension.

        Args:
            found: the new chunks that it maps. When no memory is left for them even after younger requests were
                preempted, the request is preempted itself, and prefilled again as a whole.
        """
        if request.status is Status.PREEMPTED:
            self.preempted.remove(request)
            request.become(Status.WAITING)
            self.add(request)
            return
        request.become(Status.RUNNING)
        if self._grow(request, found):  # the old spans stay: prefix nodes may have been split since
            request.map_chunks(found)

    def read(self, request: Request) -> None:
        """Let a request go on whose answer is read again."""
        if request.status is Status.UNREAD:
            self.preempted.remove(request)
            request.become(Status.WAITING)
            self.add(request)

    def preempt(self, request: Request) -> None:
        """Free a request's memory. The request keeps its generated tokens and queues again, at once or when its search
        ends or its answer is read."""
        self._slices[:] = [part for part in self._slices if part.rows is not request]
        self._stop(request)
        self.memory.release(request)
        request.usage.preemptions += 1
        self.counters["preemptions"] += 1
        if request.status is Status.SEARCHING:
            request.become(Status.PREEMPTED)
            self.preempted.append(request)
        elif request.status is Status.RUNNING and request.stream.full:
            request.become(Status.UNREAD)
            self.preempted.append(request)
        else:
            request.become(Status.WAITING)
            self.add(request)

    def remove(self, request: Request) -> None:
        """Remove a request for good, whatever its status, and free its memory."""
        if request.status.admitted:
            self._stop(request)
            self.memory.release(request)
        elif request in self.preempted:
            self.preempted.remove(request)
        elif request in self.waiting:
            self.withdraw(request)
        request.become(Status.FINISHED)
        if self.idle:
            self.turns.forget()

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.turns.stop(request)


def _add(counts: dict[str, int], user: str, n: int) -> None:
    if n:
        counts[user] = counts.get(user, 0) + n


def _finishing(slices: list[BatchSlice]) -> set[Resident]:
    """Return the chunks that are ready within this step: their last row is computed in it, and no press follows."""
    jobs = [s.rows for s in slices if isinstance(s.rows, CompileJob) and s.hi == len(s.rows)]
    return {job.resident for job in jobs if not job.resident.is_pressed}


def _end(request: Request) -> int:
    """Return the end of the rows that a request's next step may compute."""
    end = len(request)
    if request.prompt.plan.two_step and request.computed < end - 1:
        end -= 1  # the last token goes alone, in a second step
    return end
