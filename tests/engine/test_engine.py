from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine import Engine, EngineConfig, SamplingParams
from tests.tiny import make_parrot


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    base = make_parrot(tmp_path_factory.mktemp("parrot"), b"abcdefgh")
    engine = Engine(EngineConfig(model=str(base), num_pages=20, num_threads=1, debug=True))
    yield engine
    engine.close()


def test_a_choice_that_ended_at_a_stop_string_does_not_harm_the_next_call(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, stop=("ef",))
    for _ in range(3):
        (output,) = engine.generate(["ab"], params)
        assert (output.text, output.finish_reason) == ("cd", "stop")


def test_a_stop_string_ends_its_own_choice_only(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    stopped = SamplingParams(temperature=0, max_tokens=20, n=2, stop=("gh",))
    outputs = engine.generate(["a", "c", "e"], [params, stopped, params])
    assert [output.text for output in outputs] == ["bcde", "def", "def", "fgha"]
