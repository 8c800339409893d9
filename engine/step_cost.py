"""What a step costs, fitted to steps that were measured. Pure.

    seconds = base + prefill · prefill tokens + row · decode rows + lora_page · pages of the adapters in it

Least squares with forgetting; a coefficient that would come out negative is 0. An adapter counts in pages of
the pool: its rank times a constant, and right too for one that adapts few projections.
"""

from __future__ import annotations

from typing import NamedTuple

FORGET = 0.995  # of the weight of what was seen before, each step
RIDGE = 1e-4  # of the diagonal: features that never vary alone share their cost
MIN_STEPS = 32
_FORGOTTEN = 1e-100  # a feature's weighted square: it has not been seen for 50,000 steps


class StepWork(NamedTuple):
    prefill_tokens: int
    decode_rows: int
    lora_pages: int


class StepCost(NamedTuple):
    """Seconds each."""

    base_s: float
    prefill_s: float
    row_s: float
    lora_page_s: float


class StepCostFit:
    def __init__(self) -> None:
        self._num_steps = 0
        self._products = [[0.0] * 4 for _ in range(4)]  # weighted sums of x xᵀ, upper half
        self._targets = [0.0] * 4  # weighted sums of x · seconds
        self._last = StepCost(0.0, 0.0, 0.0, 0.0)

    def observe(self, work: StepWork, seconds: float) -> None:
        x = (1.0, *work)
        for i in range(4):
            row, xi = self._products[i], x[i]
            for j in range(i, 4):
                row[j] = FORGET * row[j] + xi * x[j]
            self._targets[i] = FORGET * self._targets[i] + xi * seconds
        self._num_steps += 1

    def cost(self) -> StepCost | None:
        """None until enough steps were seen. What is forgotten costs what it did when this was asked last."""
        if self._num_steps < MIN_STEPS:
            return None
        forgotten = [i for i in range(4) if self._products[i][i] < _FORGOTTEN]
        features = [i for i in range(4) if i not in forgotten]
        while True:
            values = self._solve(features)
            worst = min(features, key=lambda i: values[i])
            if values[worst] >= 0.0:
                values |= {i: self._last[i] for i in forgotten}
                self._last = StepCost(*(values.get(i, 0.0) for i in range(4)))
                return self._last
            features.remove(worst)

    def _solve(self, features: list[int]) -> dict[int, float]:
        """Gauss elimination; the ridge keeps every pivot positive."""
        size = len(features)
        rows = [
            [self._products[min(i, j)][max(i, j)] * (1.0 + RIDGE * (i == j)) for j in features]
            + [self._targets[i]]
            for i in features
        ]
        for k in range(size):
            for i in range(k + 1, size):
                factor = rows[i][k] / rows[k][k]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[k], strict=True)]
        values = [0.0] * size
        for k in reversed(range(size)):
            known = sum(rows[k][j] * values[j] for j in range(k + 1, size))
            values[k] = (rows[k][size] - known) / rows[k][k]
        return dict(zip(features, values, strict=True))
