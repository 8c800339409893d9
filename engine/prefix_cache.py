"""KV pages that later requests with the same prefix may share. Pure: ints and tuples, no tensors, no clock.

A trie a namespace; a node is one full page. The namespace is the adapter's content digest ("" for the base
model), because K and V depend on the adapter: the same tokens under another adapter, or under another version
of it, must never match.

A node in use keeps all its ancestors in use, so every unused node has an unused subtree and can be evicted
leaf by leaf.

Most pages are of prompts that never come back, and a few of system prompts that come back all the time. So
nodes that were found once are kept apart from those that never were, and each kind counts how often it is
found (segmented LRU).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter, itemgetter

_REUSE_WINDOW = 1 << 14
"""Pages after which the counts of reuse are halved."""


@dataclass(slots=True, eq=False)
class PrefixNode:
    namespace: str
    tokens: tuple[int, ...]  # of this page
    page_id: int
    parent: PrefixNode | None  # None: the root, which has no page
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)
    num_users: int = 0
    was_found: bool = False  # by a request that came later; then its ancestors were, too
    last_used: float = 0.0


@dataclass(slots=True)
class _Segment:
    """Nodes of one kind."""

    unused: OrderedDict[PrefixNode, None] = field(default_factory=OrderedDict)
    num_entered: int = 1
    num_found: int = 1  # how often one of them was found

    @property
    def reuse(self) -> float:
        """How often one is found, on average, before it goes."""
        return self.num_found / self.num_entered

    def enter(self) -> None:
        self.num_entered += 1
        if self.num_entered > _REUSE_WINDOW:
            self.num_entered //= 2
            self.num_found = max(1, self.num_found // 2)


class PrefixCache:
    """Times passed in never go back."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._roots: dict[str, PrefixNode] = {}
        self._num_nodes = 0
        # each by last use, and children before their parent
        self._new = _Segment()
        self._found = _Segment()

    @property
    def num_pages(self) -> int:
        return self._num_nodes

    @property
    def num_evictable(self) -> int:
        return len(self._new.unused) + len(self._found.unused)

    @property
    def namespaces(self) -> tuple[str, ...]:
        return tuple(self._roots)

    @property
    def new_reuse(self) -> float:
        """How often a page that was never found is found yet, on average."""
        return self._new.reuse

    def new_last_used(self, count: int) -> float | None:
        """The last use of the `count`-th oldest unused page that was never found; None: there are fewer."""
        if len(self._new.unused) < count:
            return None
        return next(islice(self._new.unused, count - 1, None)).last_used

    def match(self, namespace: str, token_ids: Sequence[int], num_tokens: int) -> list[PrefixNode]:
        """The longest chain of cached full pages within the first `num_tokens`. Modifies nothing."""
        node = self._roots.get(namespace)
        chain: list[PrefixNode] = []
        for start in range(0, num_tokens - self.page_tokens + 1, self.page_tokens):
            if node is None:
                break
            node = node.children.get(tuple(token_ids[start : start + self.page_tokens]))
            if node is not None:
                chain.append(node)
        return chain

    def insert(
        self, namespace: str, parent: PrefixNode | None, tokens: tuple[int, ...], page_id: int
    ) -> PrefixNode:
        """The node for `tokens` below `parent`, acquired; the page becomes the cache's unless it existed.

        The caller holds `parent`, and compares `node.page_id` with its own page to learn whose it is.
        """
        assert len(tokens) == self.page_tokens
        above = parent or self._roots.setdefault(namespace, PrefixNode(namespace, (), -1, None))
        node = above.children.get(tokens)
        if node is not None:
            self._acquire(node)  # computed once more, so that nothing was saved
            return node
        node = PrefixNode(namespace, tokens, page_id, above, num_users=1)
        above.children[tokens] = node
        self._num_nodes += 1
        self._new.enter()
        return node

    def acquire(self, nodes: Sequence[PrefixNode]) -> None:
        """`nodes` go from the root downwards, without gaps below those that the caller holds already."""
        for node in nodes:
            self._acquire(node)
            self._segment(node).num_found += 1
            if not node.was_found:
                node.was_found = True
                self._found.enter()

    def release(self, nodes: Sequence[PrefixNode], now: float) -> None:
        """All that one request holds, from the root downwards."""
        for node in reversed(nodes):
            assert node.num_users > 0
            node.num_users -= 1
            node.last_used = now
            if node.num_users == 0:
                self._segment(node).unused[node] = None

    def cheapest_leaf(self, worth: Callable[[float, float], float]) -> tuple[float, PrefixNode] | None:
        """An unused leaf that may go first, and its worth, a function of its last use and of how often pages
        of its kind are found again."""
        heads = [
            (worth(head.last_used, segment.reuse), head)
            for segment in (self._new, self._found)
            if (head := next(iter(segment.unused), None)) is not None
        ]
        if not heads:
            return None
        # of equals the one that was never found: it may be the other's child
        least, node = min(heads, key=itemgetter(0))
        return least, _oldest_leaf(node)

    def oldest_evictable(self) -> PrefixNode | None:
        """The unused leaf that was used longest ago, or None."""
        found = self.cheapest_leaf(lambda last_used, _: last_used)
        return None if found is None else found[1]

    def oldest_leaf(self, namespace: str) -> PrefixNode | None:
        """Of a namespace that nobody uses: the leaf below those used longest ago, or None."""
        root = self._roots.get(namespace)
        return None if root is None else _oldest_leaf(root)

    def evict(self, node: PrefixNode) -> int:
        """Remove an unused leaf; the page is the caller's again."""
        assert node.num_users == 0
        assert not node.children
        parent = node.parent
        assert parent is not None
        del self._segment(node).unused[node]
        del parent.children[node.tokens]
        self._num_nodes -= 1
        if parent.parent is None and not parent.children:
            del self._roots[parent.namespace]
        return node.page_id

    def evict_namespace(self, namespace: str) -> list[int]:
        """Remove all that is unused under `namespace`; returns its pages."""
        nodes = [n for n in self._walk(namespace) if n.num_users == 0]
        # children stand behind their parents in the walk
        return [self.evict(node) for node in reversed(nodes)]

    def check_invariants(self) -> None:
        nodes = [n for namespace in self._roots for n in self._walk(namespace)]
        assert len(nodes) == self._num_nodes
        pages = [n.page_id for n in nodes]
        assert len(set(pages)) == len(pages), "two nodes share a page"
        position: dict[PrefixNode, int] = {}
        for segment in (self._new, self._found):
            kind = {n for n in nodes if n.num_users == 0 and self._segment(n) is segment}
            assert kind == set(segment.unused)
            position |= {n: i for i, n in enumerate(segment.unused)}
            times = [n.last_used for n in segment.unused]
            assert times == sorted(times)
        for node in nodes:
            assert node.parent is not None
            assert node.parent.children[node.tokens] is node
            is_top = node.parent.parent is None
            assert is_top or node.num_users <= node.parent.num_users
            assert is_top or node.parent.was_found or not node.was_found
            if node in position and not is_top and node.parent.was_found == node.was_found:
                assert position[node] < position.get(node.parent, len(position))

    def _acquire(self, node: PrefixNode) -> None:
        if node.num_users == 0:
            del self._segment(node).unused[node]
        node.num_users += 1

    def _segment(self, node: PrefixNode) -> _Segment:
        return self._found if node.was_found else self._new

    def _walk(self, namespace: str) -> Iterator[PrefixNode]:
        root = self._roots.get(namespace)
        stack = list(root.children.values()) if root else []
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _oldest_leaf(node: PrefixNode) -> PrefixNode:
    while node.children:
        node = min(node.children.values(), key=attrgetter("last_used"))
    return node
