"""KV pages that later requests with the same prefix may share. Pure: ints and tuples, no tensors, no clock.

A trie a namespace; a node is one full page. The namespace is the adapter's content digest ("" for the base
model), because K and V depend on the adapter: the same tokens under another adapter, or under another version
of it, must never match.

A node in use keeps all its ancestors in use, so every unused node has an unused subtree and can be evicted
leaf by leaf.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class PrefixNode:
    namespace: str
    tokens: tuple[int, ...]  # of this page
    page_id: int
    parent: PrefixNode | None
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)
    num_users: int = 0
    last_used: float = 0.0


class PrefixCache:
    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._roots: dict[str, PrefixNode] = {}
        self._num_nodes = 0
        self._num_unused = 0
        # candidates for eviction, checked when popped: (last_used, tie-break, node)
        self._heap: list[tuple[float, int, PrefixNode]] = []
        self._ticket = itertools.count()

    @property
    def num_pages(self) -> int:
        return self._num_nodes

    @property
    def num_evictable(self) -> int:
        return self._num_unused

    def match(self, namespace: str, tokens: Sequence[int]) -> list[PrefixNode]:
        """The longest chain of cached full pages that `tokens` starts with. Modifies nothing."""
        node = self._roots.get(namespace)
        chain: list[PrefixNode] = []
        for start in range(0, len(tokens) - self.page_tokens + 1, self.page_tokens):
            if node is None:
                break
            node = node.children.get(tuple(tokens[start : start + self.page_tokens]))
            if node is not None:
                chain.append(node)
        return chain

    def insert(
        self, namespace: str, parent: PrefixNode | None, tokens: tuple[int, ...], page_id: int
    ) -> PrefixNode:
        """The node for `tokens` below `parent`; the page becomes the cache's unless the node exists already.

        The caller compares `node.page_id` with its own page to learn which.
        """
        assert len(tokens) == self.page_tokens
        above = parent or self._roots.setdefault(namespace, PrefixNode(namespace, (), -1, None))
        existing = above.children.get(tokens)
        if existing is not None:
            return existing
        node = PrefixNode(namespace, tokens, page_id, above)
        above.children[tokens] = node
        self._num_nodes += 1
        self._num_unused += 1
        self._offer(node)
        return node

    def acquire(self, nodes: Sequence[PrefixNode]) -> None:
        """`nodes` go from the root downwards, without gaps below those that the caller holds already."""
        for node in nodes:
            self._num_unused -= node.num_users == 0
            node.num_users += 1

    def release(self, nodes: Sequence[PrefixNode], now: float) -> None:
        for node in nodes:
            assert node.num_users > 0
            node.num_users -= 1
            node.last_used = now
            if node.num_users == 0:
                self._num_unused += 1
                self._offer(node)

    def cancel(self, nodes: Sequence[PrefixNode]) -> None:
        """Undo an `acquire` as if it had never been: they were not used."""
        for node in nodes:
            node.num_users -= 1
            if node.num_users == 0:
                self._num_unused += 1
                self._offer(node)

    def oldest_evictable(self) -> PrefixNode | None:
        """The unused leaf that was used longest ago, or None."""
        while self._heap:
            last_used, _, node = self._heap[0]
            if self._is_evictable(node) and node.last_used == last_used:
                return node
            heapq.heappop(self._heap)
        return None

    def evict(self, node: PrefixNode) -> int:
        """Remove an unused leaf; the page is the caller's again."""
        assert self._is_evictable(node)
        assert node.parent is not None
        parent = node.parent
        del parent.children[node.tokens]
        node.parent = None
        self._num_nodes -= 1
        self._num_unused -= 1
        if parent.parent is None:
            if not parent.children:
                del self._roots[parent.namespace]
        else:
            self._offer(parent)
        return node.page_id

    def evict_namespace(self, namespace: str) -> list[int]:
        """Remove all that is unused under `namespace`; returns its pages."""
        nodes = [n for n in self._walk(namespace) if n.num_users == 0]
        # children stand behind their parents in the walk
        return [self.evict(node) for node in reversed(nodes)]

    def num_namespace_pages(self, namespace: str) -> int:
        return sum(1 for _ in self._walk(namespace))

    def check_invariants(self) -> None:
        nodes = [n for namespace in list(self._roots) for n in self._walk(namespace)]
        assert len(nodes) == self._num_nodes
        assert sum(n.num_users == 0 for n in nodes) == self._num_unused
        pages = [n.page_id for n in nodes]
        assert len(set(pages)) == len(pages), "two nodes share a page"
        candidates = {id(n) for t, _, n in self._heap if n.last_used == t}
        for node in nodes:
            assert node.parent is not None
            assert node.parent.children[node.tokens] is node
            assert node.num_users <= node.parent.num_users or node.parent.parent is None
            assert not self._is_evictable(node) or id(node) in candidates, "an evictable leaf is forgotten"

    def _is_evictable(self, node: PrefixNode) -> bool:
        return node.num_users == 0 and not node.children and node.parent is not None

    def _offer(self, node: PrefixNode) -> None:
        if self._is_evictable(node):
            heapq.heappush(self._heap, (node.last_used, next(self._ticket), node))

    def _walk(self, namespace: str) -> Iterator[PrefixNode]:
        root = self._roots.get(namespace)
        stack = list(root.children.values()) if root else []
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
