"""For those who have Locust, from the repository's root:

    pip install locust; PYTHONPATH=. locust -f load_tests/locustfile.py --host http://HOST:8000

Each user asks, at most once a second, for one of the server's adapters, zipf, and reports the time to the
first token as an entry of its own. A closed loop: users wait for their answers, so a slow server is asked
less. For latencies under a given load take `python -m load_tests.harness`. Key: LORAFLEET_API_KEY.
"""

from __future__ import annotations

import os
import random
import time

from locust import HttpUser, constant_throughput, task

from load_tests.harness.workload import TOKEN_IDS, popularity

EXPONENT = 1.0
NUM_PROMPT, NUM_OUTPUT = 64, 32  # tokens


class Client(HttpUser):  # type: ignore[misc]  # locust is not installed where types are checked
    wait_time = constant_throughput(1)  # a second, of each user

    def on_start(self) -> None:
        if key := os.environ.get("LORAFLEET_API_KEY"):
            self.client.headers["authorization"] = f"Bearer {key}"
        models = self.client.get("/v1/models").json()["data"]
        self._adapters = [model["id"] for model in models if model.get("parent")]
        self._random = random.Random()
        self._pick = popularity("zipf", len(self._adapters), self._random, EXPONENT)

    @task  # type: ignore[untyped-decorator]
    def complete(self) -> None:
        body = {
            "model": self._adapters[self._pick(0.0)],
            "prompt": self._random.choices(TOKEN_IDS, k=NUM_PROMPT),
            "max_tokens": NUM_OUTPUT,
            "stream": True,
        }
        started = time.perf_counter()
        first_ms, is_done = 0.0, False
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True) as answer:
            for line in answer.iter_lines():
                if line and not first_ms:
                    first_ms = 1e3 * (time.perf_counter() - started)
                is_done = line == b"data: [DONE]"
                if is_done:
                    break
            if not is_done:
                answer.failure(f"no end, status {answer.status_code}")
        if first_ms:
            self.environment.events.request.fire(
                request_type="SSE",
                name="first token",
                response_time=first_ms,
                response_length=0,
                exception=None,
            )
