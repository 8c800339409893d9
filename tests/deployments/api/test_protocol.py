"""Request bodies as types."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from deployments.api.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest

NUM_WRONG = 1000


@pytest.mark.parametrize(
    ("body_type", "fields"),
    [
        (CompletionRequest, {"prompt": [True] * NUM_WRONG}),
        (CompletionRequest, {"prompt": [[1.5]] * NUM_WRONG}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * NUM_WRONG}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * NUM_WRONG}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {f"a{i}": 1 for i in range(2 * NUM_WRONG)}}),
        (ChatCompletionRequest, {"messages": [{}] * NUM_WRONG}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [{}] * NUM_WRONG}]}),
    ],
)
def test_body_full_of_errors_costs_as_little_as_one(
    body_type: type[GenerationRequest], fields: dict[str, Any]
) -> None:
    """An error per item would take minutes of everybody's time for one body of 4 MiB."""
    with pytest.raises(ValidationError) as refused:
        body_type.model_validate({"model": "m", **fields})
    assert refused.value.error_count() <= 4  # one per form that a field may have
