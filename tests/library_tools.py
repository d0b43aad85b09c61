"""Helpers of the library's tests: chunks, images, clocks, and file systems that fail."""

import asyncio
import errno
import io
import os
import sqlite3
from contextlib import closing

import torch
from PIL import Image

from mpic.durable import FileSystem
from mpic.kv.chunk import ChunkInputs, ChunkKey, ChunkKV, KVKey, Recipe
from mpic.kv.file import encode
from mpic.library import SHARED, Library
from mpic.library.caches import CachedText
from mpic.library.catalog import database

MODEL = "a1" * 32


def text_key(text="some text", owner="ann", model=MODEL, dtype="float32", **recipe):
    return KVKey(owner, ChunkKey.of_text(text), model, Recipe(dtype, **recipe))


def drop(store, key, catalog):
    """Delete a content as the library does: row and file, also one that is being saved."""
    with store.lock:
        with catalog.write() as db:
            rows = store.drop(db, key.owner, key.chunk)
        store.erase(rows)


def make_chunk(key=None, n=5, layers=3, heads=2, dim=4, image=False, positions=1, seed=0):
    """A ChunkKV of random numbers."""
    key = key or text_key()
    dtype = getattr(torch, key.recipe.dtype)
    g = torch.Generator().manual_seed(seed)
    inputs = ChunkInputs(
        token_ids=torch.randint(0, 99, (n,), generator=g),
        positions=torch.arange(n).expand(positions, n).contiguous(),
        rotary_length=n + 3 if image else n,
        embeds=torch.randn(n, 7, generator=g).to(dtype) if image else None,
        deepstack=torch.randn(2, n, 7, generator=g).to(dtype) if image else None,
    )
    return ChunkKV(key, inputs, torch.randn(layers, 2, heads, n, dim, generator=g).to(dtype))


def chunks(count, **options):
    return [make_chunk(text_key(f"text {i}", **options), seed=i) for i in range(count)]


def size_of(chunk):
    return sum(map(len, encode(chunk)))


def same_inputs(a, b):
    """Return whether two ChunkInputs are equal."""
    for name in ("token_ids", "positions", "embeds", "deepstack"):
        x, y = getattr(a, name), getattr(b, name)
        if (x is None) != (y is None) or (x is not None and not (x.dtype == y.dtype and torch.equal(x, y))):
            return False
    return a.rotary_length == b.rotary_length


def read(stored, like):
    """Read the KV of a stored chunk, and check that its layers come in order."""
    destination = torch.full_like(like, float("nan"))
    assert list(stored.read_layers(destination)) == list(range(like.shape[0]))
    return destination


def read_in_parts(stored, like):
    parts = stored.in_parts(1 << 20)
    for part in parts.parts:
        for piece, read_piece in parts.read_part(part):
            read_piece(torch.empty_like(piece.of(like)).contiguous())


def encoded(image=None, format="PNG", **options):
    """The bytes of an image file."""
    out = io.BytesIO()
    (image or picture()).save(out, format, **options)
    return out.getvalue()


def picture(seed=0, size=(16, 12)):
    noise = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(noise.to(torch.uint8).numpy(), "RGB")


def flip(path, at):
    """Change one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def saved(library, *chunks, clock=None):
    """Save chunks, a second apart if there is a clock; return the only one, or all of them."""
    for chunk in chunks:
        if clock is not None:
            clock.now += 1
        library.store.save(chunk)
    return chunks if len(chunks) > 1 else chunks[0]


def everything(root, sidecars=False):
    """Return all files below a folder, relative to it, except the catalogue, the lock, the marker, and (by default)
    the sidecars of existing originals."""
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    found = {name for name in found if not name.startswith(("catalog.sqlite", "lock", "mpic-library.json"))}
    return found if sidecars else found - {f"{name}.json" for name in found}


class Clock:
    def __init__(self, now=1_000_000.0):
        self.now = now

    def __call__(self):
        return self.now


class Upload:
    """An async reader like that of a server; ``before`` runs before each piece."""

    def __init__(self, data, before=None):
        self._stream = io.BytesIO(data)
        self._before = before

    async def read(self, size):
        if self._before is not None:
            await self._before()
        return self._stream.read(size)


class FullDisk(FileSystem):
    """A disk with this many bytes left (None: no limit). It writes what fits, then fails."""

    def __init__(self, left=None):
        super().__init__()
        self.left = left

    def write(self, fd, data):
        if self.left is None:
            return super().write(fd, data)
        if self.left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = super().write(fd, data[: self.left])
        self.left -= done
        return done


class Unreadable(FileSystem):
    """A disk whose chunk files cannot be read from byte ``begin`` on, while ``broken``."""

    def __init__(self, begin=0):
        super().__init__()
        self.broken, self.begin = False, begin

    def read(self, fd, into, offset):
        if self.broken and offset >= self.begin:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(fd, into, offset)


def no_memory_once(function):
    """A function that fails for want of memory, as torch does, and works from then on."""
    failing = [True]

    def call(*args, **options):
        if failing:
            failing.pop()
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return function(*args, **options)

    return call


class Connection:
    """A connection to a database, of which tests change a method."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Crash(BaseException):
    """The machine stops here."""


class CrashingFiles(FileSystem):
    """Stops before the change number ``at``; after that nothing reaches the disk any more."""

    def __init__(self, at):
        super().__init__()
        self.at = at
        self.changes = 0
        self.dead = False

    def _change(self):
        if self.dead or self.changes == self.at:
            self.dead = True
            raise Crash
        self.changes += 1

    def create(self, path):
        self._change()
        return super().create(path)

    def write(self, fd, data):
        self._change()
        return super().write(fd, data[: max(2048, len(data) // 2)])

    def sync(self, fd):
        self._change()
        super().sync(fd)

    def rename(self, source, target):
        self._change()
        super().rename(source, target)

    def sync_folder(self, folder):
        self._change()
        super().sync_folder(folder)

    def remove(self, path):
        self._change()
        super().remove(path)


def kill(library: Library):
    """Drop a library like a dying process, without writing anything."""
    library._open = False
    library.catalog.close()
    library.folder.release()


def downgrade(root, version, monkeypatch):
    """Rewrite the catalogue of a closed library to the form of an earlier version."""
    new, old = root / "catalog.sqlite", root / "old.sqlite"
    with monkeypatch.context() as patch:
        patch.setattr(
            database, "MIGRATIONS", {n: step for n, step in database.MIGRATIONS.items() if n <= version}
        )
        database.Catalog(old).close()
    with closing(sqlite3.connect(old)) as db:
        db.execute("ATTACH ? AS new", (str(new),))
        for (table,) in db.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'").fetchall():
            if not table.startswith("sqlite_") and table != "usage":  # triggers fill this table
                columns = ", ".join(row[1] for row in db.execute(f"PRAGMA main.table_info({table})"))
                db.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM new.{table}")
        db.commit()
    old.rename(new)


def lose_catalogue(root):
    for path in root.glob("catalog.sqlite*"):
        path.unlink()


def fill(library):
    """Add three uploads with their chunks, a cache and a reference."""
    for number, chunk in enumerate(chunks(3)):
        library.files.add("ann", f"text {number}".encode(), f"{number}.txt", handle=f"H{number}")
        library.store.save(chunk)
    library.caches.create("ann", [CachedText("one", 0, 3), CachedText("two", 3, 6)], name="cache")
    asyncio.run(library.references.add(b"a reference", "r.txt", title="R", id="ref_1"))


def store_of_each(library):
    """Store two uploads, a reference and two chunks; return the keys of the chunks."""
    ann = library.files.add("ann", b"ann's text", "a.txt", handle="A", metadata={"n": 1})
    library.files.add("bob", encoded(), "b.png", expires_after=10**6)
    asyncio.run(library.references.add(b"a reference", "r.txt", title="R", id="ref_r", metadata={"k": "v"}))
    keys = [KVKey("ann", ann.key, "a1" * 32, Recipe("float32")), text_key("r", owner=SHARED)]
    for key in keys:
        library.store.save(make_chunk(key, image=True))
    library.files.pin("ann", ann.id)
    return keys


class Remote:
    """A tier at the other end of a network, simulated by a dictionary."""

    name = "remote"

    class Chunk:
        tier = "remote"

        def __init__(self, chunk):
            self.inputs, self.chunk = chunk.inputs, chunk

        def read_layers(self, destination):
            for layer, kv in enumerate(self.chunk.kv):
                destination[layer].copy_(kv)
                yield layer

    def __init__(self):
        self.chunks, self.requested = {}, 0

    def find(self, keys):
        self.requested += len(keys)
        return {key: self.Chunk(self.chunks[key]) for key in keys if key in self.chunks}

    def save(self, chunk):
        self.chunks[chunk.key] = chunk

    def drop(self, owner, chunk):
        self.chunks = {k: v for k, v in self.chunks.items() if (k.owner, k.chunk) != (owner, chunk)}

    def stats(self):
        return {"requested": self.requested, "hits": 0, "chunks": len(self.chunks), "bytes": 0, "evicted": 0}

    def check(self):
        pass
