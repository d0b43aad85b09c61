"""The library: uploads, references and their compiled chunks, durable and kept apart by user.

::

    library = Library.open(root)
    engine = ...(store=library.store)
    library.files.tokenize = ...
    file = await library.files.upload(user, stream, "eiffel.jpg", handle="EIFFEL2025")
    engine.compile(library.files.chunk(user, file))
    reference = await library.references.add(stream, "map.png", title="Map of the harbour")

The paper's terms are *static library* for uploads (``uploads``) and *dynamic library* for references (``references``).
Each package imports only those above it in this table:

=============  ======================================================================================================
``folder``     the files on the disk: names, originals, their sidecars, the locked folder itself, quarantine
``catalog``    the SQLite database, its schema, and the rows of files and references
``store``      tiers of compiled chunks: disk, host memory, a shared store
``intake``     what every upload passes through: checks and decoding
``uploads``    files of users; ``caches``: texts cached explicitly; ``references``: what administrators provide
``reconcile``  catalogue and files brought into agreement at a start; ``rebuild``: a lost catalogue made again
``library``    ``Library``, the facade over all of these
``copies``     backup, restore, imports and syncs of references; ``upkeep``: check and clean-up of an open library
=============  ======================================================================================================
"""

from mpic.library.caches import Cache, CacheChunk
from mpic.library.intake.decode import decode_image, thumbnail
from mpic.library.library import Library
from mpic.library.limits import Limits
from mpic.library.records import SHARED, Change, File, Reference, StorageUsage
from mpic.library.store import HostTier

__all__ = [
    "SHARED",
    "Cache",
    "CacheChunk",
    "Change",
    "File",
    "HostTier",
    "Library",
    "Limits",
    "Reference",
    "StorageUsage",
    "decode_image",
    "thumbnail",
]
