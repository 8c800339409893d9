"""One request inside the scheduler: its tokens, its pages, and when it ends. Owned by the scheduler."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engine.page_pool import Owner, PageKind
from engine.prefix_cache import PrefixNode
from engine.request import FinishReason


@dataclass(slots=True, eq=False)
class Sequence:
    request_id: str
    arrival: int  # ticket: order of arrival, kept over preemptions
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # EOS is one of them unless it is to be ignored
    digest: str | None = None  # adapter content; None: base model
    num_adapter_pages: int = 0

    token_ids: list[int] = field(init=False)  # prompt and output, as far as it is known
    num_pending: int = 0  # tokens beyond these that steps in flight sample
    num_computed: int = 0  # tokens whose KV is in the pool once the steps in flight are done
    num_cached: int | None = None  # prompt tokens found in the prefix cache at first admission
    # page_ids = the pages of `nodes` (shared, owned by the prefix cache), then our own
    page_ids: array[int] = field(default_factory=lambda: array("i"))
    nodes: list[PrefixNode] = field(default_factory=list)
    num_overtaken: int = 0  # admissions past this request while it was blocked
    blocked_since: float | None = None

    def __post_init__(self) -> None:
        assert self.prompt_token_ids
        assert self.max_tokens > 0
        self.token_ids = list(self.prompt_token_ids)

    @property
    def owner(self) -> Owner:
        return Owner(PageKind.SEQUENCE, self.request_id)

    @property
    def is_running(self) -> bool:
        return bool(self.page_ids)

    @property
    def namespace(self) -> str:
        return self.digest or ""

    @property
    def num_uncomputed(self) -> int:
        """Tokens that steps to come must compute. 0: the last token it may have is in flight."""
        num_tokens = len(self.token_ids) + self.num_pending
        if num_tokens >= len(self.prompt_token_ids) + self.max_tokens:
            return 0
        return num_tokens - self.num_computed

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def own_page_ids(self) -> tuple[int, ...]:
        return tuple(self.page_ids[len(self.nodes) :])

    def start(self, nodes: list[PrefixNode], page_ids: tuple[int, ...], page_tokens: int) -> None:
        """It runs now; the KV of its first pages is found in `nodes`."""
        self.nodes = nodes
        self.page_ids = array("i", [n.page_id for n in nodes])
        self.page_ids.extend(page_ids)
        self.num_computed = len(nodes) * page_tokens
        if self.num_cached is None:
            self.num_cached = self.num_computed
        self.blocked_since, self.num_overtaken = None, 0

    def stop(self) -> None:
        """Its pages are not its own any more; its tokens are kept."""
        self.page_ids, self.nodes, self.num_computed = array("i"), [], 0

    def append(self, token_id: int) -> FinishReason | None:
        self.token_ids.append(token_id)
        num_outputs = self.num_outputs
        if token_id in self.stop_token_ids and num_outputs >= self.min_tokens:
            return "stop"
        return "length" if num_outputs >= self.max_tokens else None
