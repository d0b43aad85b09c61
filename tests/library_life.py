"""A sequence of changes to a library, recorded one by one, and the states that a crash may leave."""

import asyncio

import torch
from crash_model import Journal, RecordingFiles
from library_tools import Clock, encoded, make_chunk, read, text_key

from mpic.durable import FileSystem
from mpic.library import SHARED, Library, Limits
from mpic.library.caches import CachedText

LIMITS = Limits(disk_bytes=22_000)
SMALL, LARGE = make_chunk(n=30), make_chunk(text_key("large"), n=40)
SHARED_CHUNK = make_chunk(text_key("new reference", owner=SHARED), n=6)


class Life:
    """A recorded part of a library's life. The things that must and may be found after a crash follow from the times at
    which each step began and was acknowledged.

    ``states[thing]`` lists (begun, acknowledged, value) in changes made to the disk so far; None means gone.
    """

    def __init__(self, root):
        self.journal = Journal(root)
        self.states = {}

    def step(self, values, action):
        """Run a step that gives things new values."""
        begun = len(self.journal)
        result = action()
        for thing, value in values.items():
            self.states.setdefault(thing, [(0, 0, None)]).append((begun, len(self.journal), value))
        return result

    def possible(self, thing, changes):
        """Return where the states of a thing that may be found after a crash begin and end."""
        states = self.states[thing]
        return sum(state[1] <= changes for state in states) - 1, sum(state[0] <= changes for state in states)

    def allowed(self, thing, changes):
        """Return the values that may be found when the power fails after this many changes."""
        first, end = self.possible(thing, changes)
        return [value for _, _, value in self.states[thing][first:end]]


def live(life):
    """Do everything that the library can do to its disk, and open it twice."""
    root, files, clock = life.journal.root, RecordingFiles(life.journal), Clock()
    library = Library.open(root, LIMITS, filesystem=files, clock=clock)
    add = library.files.add
    text = life.step({"T": (b"some text", None)}, lambda: add("ann", b"some text", "t.txt", handle="T"))
    life.step({"small": SMALL}, lambda: library.store.save(SMALL))
    image = life.step(
        {"I": (encoded(), clock.now + 60)},
        lambda: add("ann", encoded(), "i.png", handle="I", expires_after=60, metadata={"a": 1}),
    )
    life.step({"small": None, "large": LARGE}, lambda: library.store.save(LARGE))  # evicts
    life.step(
        {"ref_1": b"old reference"},
        lambda: asyncio.run(library.references.add(b"old reference", "r", title="R", id="ref_1")),
    )
    life.step({"I": (encoded(), None)}, lambda: library.files.extend("ann", image.id, None))
    parts = [CachedText(f"part {i}", i, i + 1) for i in range(3)]
    texts = tuple(part.text.encode() for part in parts)
    create = lambda: library.caches.create("ann", parts, name="C", ttl=60)
    cache = life.step({"C": (texts, clock.now + 60)}, create)
    life.step({"C": (texts, None)}, lambda: library.caches.extend("ann", cache.id, None))
    life.step({"T": None}, lambda: library.files.delete("ann", text.id))
    life.step({}, library.close)
    library = Library.open(root, LIMITS, filesystem=files, clock=clock)
    held = library.references.chunk(library.references.get("ref_1"), lambda text: (1,))
    life.step(
        {"ref_1": b"new reference"},
        lambda: asyncio.run(library.references.replace("ref_1", b"new reference")),
    )
    life.step({"shared": SHARED_CHUNK}, lambda: library.store.save(SHARED_CHUNK))
    del held
    life.step({}, library.references.collect_retired)
    life.step(
        {"E": (b"short", clock.now + 5)},
        lambda: library.files.add("ann", b"short", "e", "E", expires_after=5),
    )
    clock.now += 5
    life.step({"E": None}, library.files.collect_expired)
    life.step({"C": None}, lambda: library.caches.delete("ann", cache.id))
    life.step({"ref_1": None, "shared": None}, lambda: library.references.remove("ref_1"))
    life.step({}, library.close)
    life.end = clock.now


class Unsynced(FileSystem):
    """A file system without syncs, for examining an image, since there is no second crash."""

    def sync(self, fd):
        pass

    def sync_folder(self, folder):
        pass

    def database(self, path, create=False):
        db = super().database(path, create)
        db.execute("PRAGMA synchronous = OFF")
        return Quick(db)


class Quick:
    """A connection that ignores requests for durability."""

    def __init__(self, db):
        self.__dict__["_db"] = db

    def execute(self, sql, *values):
        return self._db.execute("SELECT 1" if sql == "PRAGMA synchronous = FULL" else sql, *values)

    def __getattr__(self, name):
        return getattr(self._db, name)

    def __setattr__(self, name, value):
        setattr(self._db, name, value)


def found(library):
    """Return the answers of a library, and compare everything it serves with the stored content."""
    here = {}
    for file in library.files.page("ann").files:
        expires = {"E": 1_000_005.0}.get(file.handle, file.expires_at)
        here[file.handle] = (library.files.content("ann", file.id), expires)
    for cache in library.caches.page("ann").caches:
        texts = tuple(library.files.content("ann", chunk.file.id) for chunk in cache.chunks)
        here[cache.name] = (texts, cache.expires_at)
    for reference in library.references.listing().references:
        here[reference.id] = library.references.content(reference)
    for name, chunk in (("small", SMALL), ("large", LARGE), ("shared", SHARED_CHUNK)):
        stored = library.store.open(chunk.key)
        if stored is not None:
            assert torch.equal(read(stored, chunk.kv), chunk.kv), "a wrong byte was served"
            here[name] = chunk
    return here
