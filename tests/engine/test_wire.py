from __future__ import annotations

import json
import socket
import threading
import tracemalloc
from dataclasses import replace

import pytest

from engine.request import AdapterRef, GenerateRequest
from engine.sampling_params import SamplingParams
from engine.wire import HEADER, decode_choices, encode_choices, encode_frame, encode_request, read_frame

REQUEST = GenerateRequest(
    "r#0",
    tuple(range(1000)),
    SamplingParams(seed=7, stop=("a", "b"), stop_token_ids=(3,), logit_bias={5: -1.5}, max_tokens=9),
    AdapterRef("sql", "dir/sql", "1"),
    timeout_s=2.5,
    is_traced=True,
)


def test_choices_arrive_as_they_were_sent_and_their_prompt_goes_once() -> None:
    params = REQUEST.params
    choices = [replace(REQUEST, request_id=f"r#{i}", params=replace(params, seed=i << 40)) for i in range(20)]
    sent = encode_choices(choices)
    assert decode_choices(*json.loads(json.dumps(sent))) == choices
    assert len(encode_frame(sent)) < 1.5 * len(encode_frame(encode_request(REQUEST)))


def test_a_length_alone_takes_no_memory() -> None:
    """As one that was written in the midst of something else: up to 4 GiB, which take seconds to clear."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(HEADER.pack(0xFFFFFFF0) + b"part")
        tracemalloc.start()
        try:
            with pytest.raises(EOFError):
                read_frame(ours)
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()


def test_a_frame_of_several_reads_is_whole() -> None:
    ours, theirs = socket.socketpair()
    message = ["x" * (3 << 20), 7]
    sender = threading.Thread(target=theirs.sendall, args=(encode_frame(message) + encode_frame("next"),))
    with ours, theirs:
        sender.start()
        assert read_frame(ours) == message
        assert read_frame(ours) == "next"
        sender.join()
