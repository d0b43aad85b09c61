"""Prefix caching of requests' own tokens (``docs/design.md``, "Prefix namespaces").

There are two kinds of namespace, which share nothing: *exact* holds KV equal to a full prefill; *linked* holds a
conversation's own earlier turns under one policy. A namespace is a radix tree. An edge is a tuple of *items*: an int is
a text token, ``(chunk digest, j)`` a recomputed image token, ``("span", kv digest, lo, hi)`` mapped slots of a chunk.
Items are stored and compared whole, so a hit is always verified against the tokens and chunks it stands for. A node's
own tokens lie in a (possibly shared) extent and are mapped into later requests as a span with base 0: a hit copies
nothing and may end at any token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpic.errors import IntegrityError
from mpic.kv.pool import Extent

Item = int | tuple[Hashable, ...]
ChunkName = tuple[str, str]
"""(owner, content digest) of a chunk."""


def own(item: Item) -> bool:
    """Return whether an item stands for an own token, which has KV in the tree (a mapped span has none)."""
    return not (isinstance(item, tuple) and item[0] == "span")


@dataclass(eq=False)
class SharedExtent:
    """An extent held by one or more nodes (the halves of a split node share one)."""

    extent: Extent
    holders: int = 1


@dataclass(eq=False)
class Node:
    """A node of a radix tree: ``items`` after the parent's. The own tokens among them lie at
    ``[lo, lo + own_tokens)`` of ``shared``."""

    items: tuple[Item, ...]
    own_tokens: int
    shared: SharedExtent | None
    lo: int
    parent: Any  # a Node; None: it is a root
    chunks: frozenset[ChunkName]
    children: dict[Item, Node] = field(default_factory=dict)
    pins: int = 0
    last_use: float = 0.0
    dead: bool = False

    def own_before(self, n: int) -> int:
        """Return how many of the first ``n`` items are own tokens. Only a node with mapped spans counts them."""
        if self.own_tokens == len(self.items):
            return n
        if n == len(self.items):
            return self.own_tokens
        return sum(map(own, self.items[:n]))


def _common(a: tuple[Item, ...], b: tuple[Item, ...]) -> int:
    """Return the number of items that both begin with, by comparing halves: item by item a long prompt would take
    milliseconds."""
    same, most = 0, min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    most -= 1
    while same < most:
        middle = (same + most + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            most = middle - 1
    return same


class PrefixCache:
    """Radix trees by namespace.

    Args:
        release: frees an extent that no node holds any more.
    """

    def __init__(self, release: Callable[[Extent], None]) -> None:
        self._release = release
        self._roots: dict[Hashable, Node] = {}
        self._pinned_dead: list[Node] = []

    def match(self, namespace: Hashable, items: Sequence[Item], limit: int) -> list[Node]:
        """Return the path of nodes over the longest known prefix of ``items`` with at most ``limit`` own tokens.

        The nodes are pinned; give them to ``unpin`` when the request ends.
        """
        items = tuple(items)
        node, matched, path = self._roots.get(namespace), 0, []
        while node is not None and matched < len(items):
            child = node.children.get(items[matched])
            if child is None:
                break
            n = _common(child.items, items[matched:])
            while child.own_before(n) > limit:
                n -= 1
            if n == 0:
                break
            if n < len(child.items):
                child = self._split(child, n)
            path.append(child)
            limit -= child.own_tokens
            matched += n
            node = child
        for node in path:
            node.pins += 1
            node.last_use = time.monotonic()
        return path

    def unpin(self, path: Sequence[Node]) -> None:
        for node in path:
            node.pins -= 1
            if node.dead and node.pins == 0:
                self._pinned_dead.remove(node)
                self._drop_extent(node)

    def insert(
        self,
        namespace: Hashable,
        items: Sequence[Item],
        chunks: frozenset[ChunkName],
        take: Callable[[int], Extent | None],
    ) -> None:
        """Add the own tokens of a finished request.

        Args:
            take: ``take(n)`` hands over an extent that begins with the KV of the n-th own token, or None when the pool
                is full; it is called only if something is new.
        """
        for empty in [name for name, root in self._roots.items() if not root.children and name != namespace]:
            del self._roots[empty]
        items = tuple(items)
        node = self._roots.setdefault(namespace, Node((), 0, None, 0, None, frozenset()))
        matched = known = 0
        while matched < len(items) and (child := node.children.get(items[matched])) is not None:
            n = _common(child.items, items[matched:])
            if n < len(child.items):
                child = self._split(child, n)
            known += child.own_tokens
            matched += n
            node = child
            node.last_use = time.monotonic()
        new = items[matched:]
        tokens = sum(map(own, new))
        if tokens == 0:
            return
        node.pins += 1  # taking may evict, but not this branch
        try:
            extent = take(known)
        finally:
            node.pins -= 1
        if extent is None:
            return
        leaf = Node(new, tokens, SharedExtent(extent), 0, node, chunks, last_use=time.monotonic())
        node.children[new[0]] = leaf

    def _split(self, node: Node, n: int) -> Node:
        """Cut a node after ``n`` items and return the upper half; both halves share the extent. The upper half is not
        pinned: pins belong to requests that matched the whole node, and pinning the lower half keeps the upper one."""
        tokens = node.own_before(n)
        upper = Node(
            node.items[:n], tokens, node.shared, node.lo, node.parent, node.chunks, last_use=node.last_use
        )
        if node.shared is not None:
            node.shared.holders += 1
        upper.parent.children[node.items[0]] = upper
        node.items, node.own_tokens, node.lo, node.parent = (
            node.items[n:],
            node.own_tokens - tokens,
            node.lo + tokens,
            upper,
        )
        upper.children[node.items[0]] = node
        return upper

    def nodes(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def evictable(self) -> Iterator[Node]:
        """Return the leaves that no running request has mapped."""
        return (node for node in self.nodes() if not node.children and node.pins == 0)

    def evict(self, node: Node) -> None:
        """Forget a leaf and free its extent if no other node shares it."""
        del node.parent.children[node.items[0]]
        node.dead = True
        self._drop_extent(node)

    def purge(self, chunk: ChunkName) -> None:
        """Forget everything that was computed over a deleted chunk, pinned or not: it is invisible at once, and freed
        when the last request releases it."""
        for node in list(self.nodes()):
            if chunk in node.chunks and not node.dead:
                self._forget_subtree(node)

    def clear(self) -> None:
        for root in self._roots.values():
            for node in list(root.children.values()):
                self._forget_subtree(node)
        self._roots.clear()

    def _forget_subtree(self, node: Node) -> None:
        del node.parent.children[node.items[0]]
        stack = [node]
        while stack:
            current = stack.pop()
            stack.extend(current.children.values())
            current.children = {}
            current.dead = True
            if current.pins:
                self._pinned_dead.append(current)
            else:
                self._drop_extent(current)

    def _drop_extent(self, node: Node) -> None:
        if node.shared is None:
            return
        node.shared.holders -= 1
        if node.shared.holders == 0:
            self._release(node.shared.extent)
        node.shared = None

    def extents(self) -> set[int]:
        """Return the identities of the extents held, for accounting."""
        held = [*self.nodes(), *self._pinned_dead]
        return {id(node.shared.extent) for node in held if node.shared is not None}

    def check(self) -> None:
        """Raise IntegrityError unless counts of holders and own tokens are right and children start with the item they
        are filed under."""
        holders: dict[int, int] = {}
        for node in [*self.nodes(), *self._pinned_dead]:
            if node.own_tokens != sum(own(i) for i in node.items) or node.pins < 0:
                raise IntegrityError("a prefix node miscounts its tokens or pins")
            if not node.dead and node.parent.children.get(node.items[0]) is not node:
                raise IntegrityError("a prefix node is filed under another item")
            if node.shared is not None:
                holders[id(node.shared)] = holders.get(id(node.shared), 0) + 1
                if node.lo + node.own_tokens > node.shared.extent.tokens:
                    raise IntegrityError("a prefix node ends beyond its extent")
                if holders[id(node.shared)] > node.shared.holders:
                    raise IntegrityError("an extent of the prefix cache has more holders than it counts")
