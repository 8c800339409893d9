"""What one GPU sends itself in the place of two comes back as the other one's part."""

from __future__ import annotations

import torch

from kernels.all_reduce.reference import all_reduce_add_rms_norm as reference
from kernels.all_reduce.triton import all_reduce_add_rms_norm
from kernels.peers.triton import NUM_SETS
from load_tests.loopback import SHARD, Loopback
from tests.kernels.peer_memory import send_rows
from tests.kernels.triton_cases import DEVICE, adapter_slots, randn

NUM_CALLS, ROWS, WIDTH, EPS = 5, 3, 200, 1e-5


def test_sums_are_twice_the_own_part() -> None:
    torch.manual_seed(0)
    comm = Loopback(WIDTH, device=DEVICE)
    sets, delta_sets = (comm.peer_buffers(ROWS, WIDTH, torch.float32) for _ in range(2))
    assert sets is not None
    assert delta_sets is not None
    slots = adapter_slots(ROWS)
    for i in range(NUM_CALLS):
        residual, y, delta = (randn(ROWS, WIDTH) for _ in range(3))
        weight, peers, delta_peers = randn(WIDTH), sets[i % NUM_SETS], delta_sets[i % NUM_SETS]
        want = reference(residual, [y] * SHARD.world, [delta] * SHARD.world, slots, weight, EPS)
        send_rows(delta, slots, delta_peers)
        out = all_reduce_add_rms_norm(residual, y, weight, EPS, peers, delta, slots, delta_peers=delta_peers)
        torch.testing.assert_close(residual, want[0])
        torch.testing.assert_close(out, want[1])
