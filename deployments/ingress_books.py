"""What an ingress counts of the requests that it gives to the fleet, and its families of series.

A request that no replica takes is counted nowhere else. Knows nothing of HTTP or Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from deployments.service import TokenSource, close
from engine.errors import EngineDead, LorafleetError, Overloaded, Unavailable
from engine.request import GenerateRequest, OutputDelta

# how a request ended, beside the codes of errors
ANSWERED = "answered"
LEFT = "left"  # by its client
FAULT = "internal_error"
# told as 0 before the first one: a rate misses what a series starts with
USUAL = (ANSWERED, LEFT, *(str(error.default_code) for error in (EngineDead, Overloaded, Unavailable)))


class IngressBooks:
    def __init__(self) -> None:
        self.num_waiting = 0  # requests without a first token
        self.ended: Counter[str] = Counter(dict.fromkeys(USUAL, 0))

    def counted(self, source: TokenSource) -> CountedSource:
        return CountedSource(source, self)

    def families(self, ingress: str) -> Iterator[Metric]:
        """`ingress`: tells this one's series from those of its like, of which a scrape reads one."""
        waiting = GaugeMetricFamily(
            "lorafleet_ingress_requests_waiting",
            "Requests without a first token, of this ingress.",
            labels=["ingress"],
        )
        waiting.add_metric([ingress], self.num_waiting)
        ended = CounterMetricFamily(
            "lorafleet_ingress_requests",
            "Requests given to the fleet, by how they ended.",
            labels=["outcome", "ingress"],
        )
        for outcome, count in sorted(self.ended.items()):
            ended.add_metric([outcome, ingress], count)
        yield from (waiting, ended)


class CountedSource:
    """A TokenSource whose requests are in the books."""

    def __init__(self, source: TokenSource, books: IngressBooks) -> None:
        self._source = source
        self._books = books

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[OutputDelta]]:
        is_waiting, unfinished, outcome = True, request.params.n, LEFT
        self._books.num_waiting += 1
        stream = self._source.generate(request)
        try:
            async for deltas in stream:
                if is_waiting:
                    self._books.num_waiting -= 1
                    is_waiting = False
                # who has all of its answer may close without asking for more
                unfinished -= sum(delta.finish_reason is not None for delta in deltas)
                outcome = LEFT if unfinished else ANSWERED
                yield deltas
        except LorafleetError as error:
            outcome = error.code or FAULT
            raise
        except Exception:
            outcome = FAULT
            raise
        finally:
            self._books.num_waiting -= is_waiting
            self._books.ended[outcome] += 1
            await close(stream)
