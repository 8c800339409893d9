"""What a load's end and a call mean, told as values: no step, no request."""

from __future__ import annotations

import pytest

from engine.adapter_control import MOVED_S, AdapterControl, LoadEnd
from engine.adapters.image import AdapterImage
from engine.adapters.loader import LoadResult
from engine.adapters.manager import AdapterManager
from engine.errors import AdapterRefused, LorafleetError, ModelNotFound, Unavailable
from engine.events import CallEvent
from engine.memory import PoolMemory
from engine.request import AdapterRef
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import Sequence
from engine.stats import EngineStats
from tests.engine.fakes import PAGE_BYTES, FakeLoader, image

A, B = AdapterRef("A", "uri-a", "v1"), AdapterRef("B", "uri-b", "v1")
NUM_PAGES = 10


class Desk:
    """One control over fakes."""

    def __init__(self, host_cache_pages: int = 100, pinned: tuple[str, ...] = ()) -> None:
        self.loader = FakeLoader()
        self.manager = AdapterManager(self.loader, host_cache_pages * PAGE_BYTES, max_parallel_loads=4)
        memory = PoolMemory(NUM_PAGES, 4, num_slots=4)
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32, prefetch=False)
        self.scheduler = Scheduler(config, memory)
        self.stats = EngineStats()
        self.now = 0.0
        self.control = AdapterControl(
            self.manager, self.scheduler, self.stats, PAGE_BYTES, pinned, lambda: self.now
        )

    def loaded(self, ref: AdapterRef, result: AdapterImage | LorafleetError, seconds: float = 0.5) -> LoadEnd:
        self.loader.submitted.remove(ref)
        if isinstance(result, LorafleetError):
            end = self.control.on_loaded(LoadResult(ref, None, result, seconds))
        else:
            end = self.control.on_loaded(LoadResult(ref, result, None, seconds))
        self.control.settle(end)
        self.manager.check_invariants()
        return end

    def queue(self, request_id: str, digest: str) -> None:
        self.scheduler.add(
            Sequence(
                request_id=request_id, arrival=1, prompt_token_ids=(1,), max_tokens=1, min_tokens=0,
                stop_token_ids=frozenset(), digest=digest, num_adapter_pages=2,
            )
        )  # fmt: skip
        self.control.use(digest)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_load_answers_its_calls_and_frees_its_requests(desk: Desk) -> None:
    assert desk.control.load("call", A) is None
    desk.manager.want(A, "r1")
    desk.manager.want(A, "r2")
    assert desk.control.find(A) is None
    end = desk.loaded(A, image(1, is_from_disk=True))
    assert (end.digest, end.tier, end.ready, end.failed) == ("digest-1", "disk", ["r1", "r2"], {})
    (answer,) = end.answers
    assert answer.call_id == "call"
    assert answer.result == image(1).report
    assert desk.control.find(A) == "digest-1"
    again = desk.control.load("again", A)
    assert again == CallEvent("again", result=image(1).report)


def test_a_load_that_fails_fails_all_that_waited(desk: Desk) -> None:
    desk.control.load("call", A)
    desk.manager.want(A, "r1")
    error = AdapterRefused("no DoRA", param="use_dora")
    end = desk.loaded(A, error)
    assert end.answers == [CallEvent("call", error=error)]
    assert (end.digest, end.ready, end.failed) == (None, [], {"r1": error})
    assert "A" not in desk.stats.adapters, "what was never loaded has no series"


def test_what_is_too_large_for_the_pool_is_refused_and_not_read_again(desk: Desk) -> None:
    desk.manager.want(A, "r1")
    end = desk.loaded(A, image(1, num_pages=NUM_PAGES))
    assert end.ready == []
    assert isinstance(end.failed["r1"], AdapterRefused)
    assert desk.loader.refused == {A: end.failed["r1"]}
    assert desk.control.find(A) is None


@pytest.mark.parametrize("is_refused", [False, True])
def test_requests_fail_if_what_they_were_queued_for_cannot_be_read_again(is_refused: bool) -> None:
    """Its image left host memory for another one's, and its source holds something else by now."""
    desk = Desk(host_cache_pages=2)
    desk.control.load("a", A)
    desk.loaded(A, image(1))
    desk.control.load("b", B)
    desk.loaded(B, image(2))
    desk.queue("queued", "digest-1")
    desk.manager.want_again("digest-1")
    refusal = AdapterRefused("truncated")
    end = desk.loaded(A, refusal if is_refused else image(3))
    assert end.ready == []
    error = end.failed["queued"]
    assert error is refusal if is_refused else isinstance(error, Unavailable)


def test_a_content_without_a_name_goes_with_its_last_request(desk: Desk) -> None:
    desk.control.load("call", A)
    desk.loaded(A, image(1))
    desk.control.use("digest-1")
    desk.control.use("digest-1")
    assert desk.control.unload("unload", "A") == CallEvent("unload", result={})
    desk.control.release("digest-1")
    assert "digest-1" in desk.manager
    desk.control.release("digest-1")
    assert "digest-1" not in desk.manager
    assert not +desk.control.num_live


def test_a_content_stays_pinned_while_a_pinned_name_means_it(desk: Desk) -> None:
    for ref in (A, B):
        desk.control.load(ref.name, ref)
        desk.loaded(ref, image(1))
        assert desk.control.pin("pin", ref.name).error is None
    residency = desk.scheduler.memory.residency
    desk.control.unpin("unpin", "A")
    assert residency.is_pinned("digest-1")
    desk.control.unpin("unpin", "B")
    assert not residency.is_pinned("digest-1")


@pytest.mark.parametrize("call", ["pin", "unload"])
def test_a_name_that_is_not_loaded_is_told(desk: Desk, call: str) -> None:
    answer = getattr(desk.control, call)("id", "A")
    assert isinstance(answer.error, ModelNotFound)
    assert answer.error.param == "model"


def test_a_hint_outlives_the_load_that_it_asked_for(desk: Desk) -> None:
    """Only hints are followed here, so a load that nobody hinted at is not copied ahead."""
    desk.control.prefetch(A)
    desk.control.load("call", B)
    for number, ref in enumerate((A, B), start=1):
        desk.loaded(ref, image(number))
    plan = desk.scheduler.schedule(0.0, desk.manager)
    assert [load.digest for load in plan.loads] == ["digest-1"]
    assert not desk.scheduler.can_prefetch(0.0, desk.manager)


def test_a_hint_that_fails_is_no_answer_to_the_request_behind_it(desk: Desk) -> None:
    desk.control.prefetch(A)
    desk.loaded(A, Unavailable("busy"))
    assert desk.loader.forgotten == [A]


@pytest.mark.parametrize(
    ("error", "waiter", "seconds"),
    [
        (AdapterRefused("no DoRA"), None, 0.5),  # the same bytes will be refused again
        (Unavailable("busy"), "r1", 0.5),
        (Unavailable("busy"), None, 0.0),  # a request's load failed a moment ago
    ],
)
def test_other_failures_are_remembered_though_it_was_hinted(
    desk: Desk, error: LorafleetError, waiter: str | None, seconds: float
) -> None:
    desk.control.prefetch(A)
    if waiter:
        desk.manager.want(A, waiter)
    desk.loaded(A, error, seconds)
    assert desk.loader.forgotten == []


def test_a_load_that_fails_unasked_and_unhinted_is_remembered(desk: Desk) -> None:
    desk.manager.want(A)
    desk.loaded(A, Unavailable("busy"))
    assert desk.loader.forgotten == []


@pytest.mark.parametrize("is_hinted", [False, True])
def test_a_load_that_ends_after_the_unload_brings_nothing_back(desk: Desk, is_hinted: bool) -> None:
    if is_hinted:
        desk.control.prefetch(A)
    else:
        desk.control.load("call", A)
    assert desk.control.unload("unload", "A") == CallEvent("unload", result={})
    assert desk.manager.loading_names == set()
    end = desk.loaded(A, image(1))
    assert [answer.error for answer in end.answers] == ([] if is_hinted else [None])
    assert desk.manager.names == {}
    assert "A" not in desk.stats.adapters
    assert "digest-1" not in desk.manager
    assert not desk.scheduler.can_prefetch(0.0, desk.manager)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_hint_that_comes_after_the_unload_is_not_followed(desk: Desk, is_loaded: bool) -> None:
    """Nor where the replica had not heard of the name yet."""
    if is_loaded:
        desk.control.load("call", A)
        desk.loaded(A, image(1))
    desk.control.unload("unload", "A")
    desk.control.prefetch(A)
    assert desk.loader.submitted == []
    desk.control.load("again", A)
    desk.loaded(A, image(1))
    assert desk.manager.names == {"A": "digest-1"}


def test_a_name_means_what_was_asked_for_last_whichever_is_read_first(desk: Desk) -> None:
    newer = AdapterRef("A", "uri-a", "v2")
    desk.control.want(A, "old")
    desk.control.load("call", newer)
    desk.loaded(newer, image(2))
    end = desk.loaded(A, image(1))
    assert end.ready == ["old"]
    assert desk.manager.names == {"A": "digest-2"}


def test_who_comes_late_for_what_a_name_left_does_not_bring_it_back(desk: Desk) -> None:
    """An alias was moved to another place; a router that has not heard of it sends one more request."""
    moved = AdapterRef("A", "uri-b", "v1")
    for ref, number in ((A, 1), (moved, 2)):
        desk.control.load(ref.uri, ref)
        desk.loaded(ref, image(number))
    desk.now = MOVED_S - 1.0
    desk.control.prefetch(A)
    desk.control.want(A, "late")
    desk.loaded(A, image(1))
    assert desk.manager.names == {"A": "digest-2"}
    assert desk.control.find(moved) == "digest-2"
    desk.control.load("back", A)
    desk.loaded(A, image(1))
    assert desk.manager.names == {"A": "digest-1"}, "that is no accident"


def test_what_requests_need_again_is_no_news_of_its_name() -> None:
    """Requests of the old version were queued when its image left host memory for the new one's."""
    desk = Desk(host_cache_pages=2)
    newer = AdapterRef("A", "uri-a", "v2")
    desk.control.load("v1", A)
    desk.loaded(A, image(1))
    desk.queue("queued", "digest-1")
    desk.control.load("v2", newer)
    desk.loaded(newer, image(2))
    desk.manager.want_again("digest-1")
    desk.loaded(A, image(1))
    assert desk.manager.names == {"A": "digest-2"}


def test_a_name_moves_on_though_another_name_has_the_content_here_already(desk: Desk) -> None:
    """Else it would mean, and hold, the old one for as long as the other is loaded."""
    desk.control.load("a", A)
    desk.loaded(A, image(1))
    desk.control.load("b", B)
    desk.loaded(B, image(2))
    moved = AdapterRef("A", B.uri, B.version)
    assert desk.control.find(moved) == "digest-2"
    desk.control.found(moved, "digest-2")
    assert desk.manager.names == {"A": "digest-2", "B": "digest-2"}
    assert "digest-1" not in desk.manager


def test_a_pin_goes_with_its_name_and_leaves_what_another_name_means() -> None:
    desk = Desk(pinned=("A",))
    residency = desk.scheduler.memory.residency
    desk.control.load("b", B)
    desk.loaded(B, image(1))
    desk.control.load("a", A)
    desk.loaded(A, image(2))
    desk.control.load("moved", AdapterRef("A", B.uri, B.version))
    assert residency.is_pinned("digest-1")
    assert not residency.is_pinned("digest-2")
    desk.control.unload("unload", "A")
    assert not residency.is_pinned("digest-1"), "B means it, which nobody has pinned"
