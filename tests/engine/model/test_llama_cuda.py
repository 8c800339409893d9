"""The GPU's forward pass in Triton's interpreter: what it computes is what the CPU's computes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

import engine.model.loading
import kernels.linear.triton
from engine.adapters.image import AdapterImage, ImageFormat
from engine.adapters.loading import load_image
from engine.model.llama import LlamaModel
from engine.model.llama_cuda import AfterBase, Base, BesideBase, Branch, CudaLlama, NoAdapters, OntoBase
from engine.model.loading import load_weights
from engine.model.spec import load_model_spec, local_spec
from engine.plan import ScheduledChunk
from engine.runner.batch import build_batch
from engine.runner.step_inputs import StepInputs
from engine.shape import NUM_PROJECTIONS
from engine.sharding import WHOLE, Shard, shard_shape
from engine.tensor_parallel.comm import ALONE, Comm, Ranks, join, leave
from kernels.linear.tiles import FEW_ROWS
from kernels.linear.triton import small_linear
from kernels.paged_attention.triton import AttentionWorkspace, plan_attention
from kernels.peers.triton import PeerSets
from kernels.sgmv import AdapterTable, AdapterViews, Split, SplitViews, absolute_offsets
from kernels.sgmv.handover import WORD, Handover
from kernels.sgmv.lists import lists_size, write_lists
from kernels.sgmv.plan import decode_plan, prefill_plan
from kernels.sgmv.table import FusedModule
from kernels.sgmv.workspace import SgmvWorkspace
from tests.kernels.peer_memory import are_empty, shared_sets
from tests.tiny import ALL_LINEAR, make_adapter, make_llama

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/engine/test_cuda.py does it there")

PAGE_TOKENS = 16
NUM_PAGES = 80
MAX_RANK = 24


def make_files(path: Path) -> None:
    base = make_llama(path / "base")
    for slot, (rank, targets) in enumerate([(4, ALL_LINEAR), (24, ["q_proj", "down_proj", "up_proj"])]):
        make_adapter(base, path / str(slot), rank=rank, targets=targets, seed=slot)


class Both:
    """One rank's model and pool, and both ways to run it."""

    def __init__(
        self,
        path: Path,
        shard: Shard = WHOLE,
        comm: Comm = ALONE,
        sets: Sequence[PeerSets] = (),
        is_full: bool = False,
    ) -> None:
        """`sets`: memory that the ranks share, for sums, deltas and logits, and what adapters hand over."""
        self.sets, self.handover_sets = sets[:3], sets[3:]
        torch.manual_seed(0)
        whole = load_model_spec(str(path / "base"))
        self.spec = local_spec(whole, shard)
        self.comm = comm
        self.weights = load_weights(whole, torch.float32, shard=shard)
        shape = self.spec.shape
        form = ImageFormat(
            whole.shape,
            shape.page_elems(PAGE_TOKENS),
            torch.float32,
            MAX_RANK,
            shard=shard,
            is_fully_sharded=is_full,
        )
        self.pool = torch.randn(NUM_PAGES, form.page_elems)
        self.split = None
        if is_full:
            by_output = shard_shape(whole.shape, shard).by_output
            self.split = Split(shard.rank, shard.world, by_output, comm)
        widths = [shape.widths(p) for p in range(NUM_PROJECTIONS)]
        self.views: AdapterViews | SplitViews = AdapterViews(self.pool, widths)
        if self.split is not None:
            self.views = SplitViews(self.pool, widths, self.split)
        self.table = AdapterTable.empty(2, shape.num_layers, NUM_PROJECTIONS, MAX_RANK)
        self.ranks = torch.zeros(2, dtype=torch.int32).numpy()
        first = 20
        for slot in range(2):
            first = self._put(slot, load_image(str(path / str(slot)), form), first)

    def _put(self, slot: int, image: AdapterImage, first: int) -> int:
        page_ids = tuple(range(first, first + image.num_pages))
        for page, page_id in zip(image.pages, page_ids, strict=True):
            self.pool[page_id] = page
        offsets = absolute_offsets(image.tile_offsets, page_ids, self.pool.shape[1])
        self.views.put(slot, offsets, image.ranks, image.scales)
        self.table.put(slot, offsets, image.ranks, image.scales)
        self.ranks[slot] = image.rank
        return first + image.num_pages

    def on_cpu(self, chunks: list[ScheduledChunk]) -> torch.Tensor:
        batch = build_batch(chunks, "cpu", PAGE_TOKENS)
        model = LlamaModel(self.spec, self.weights, comm=self.comm)
        return model.forward(batch, self.pool.clone(), self.views)

    def on_gpu(self, chunks: list[ScheduledChunk], kind: str) -> torch.Tensor:
        shape = self.spec.shape
        pool = self.pool.clone()
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        if kind == "beside":
            plan = decode_plan(num_tokens, MAX_RANK)
        else:
            plan = prefill_plan(num_tokens + 3, 8, MAX_RANK)
        inputs = StepInputs(64, 8, 8, lists_size(plan), PAGE_TOKENS, {}, torch.device("cpu"))
        num_rows = num_tokens + 3 * (kind == "onto")  # a graph's rows past the batch
        num_seqs = len(chunks) + 3 * (kind == "onto")
        batch = inputs.write(chunks, num_rows, num_seqs, int)
        model = CudaLlama(self.spec, self.weights, 128, self.comm, *self.sets)
        modules = (model.qkv, model.o, model.gate_up, model.down)
        handover, step = None, 0
        if self.split is not None and self.handover_sets:
            num_calls = shape.num_layers * NUM_PROJECTIONS
            words, planes = self.handover_sets
            handover = Handover(words, planes, self.split, num_calls, lambda: None)
            step = handover.next_step()
        lists = inputs.device["lists"]
        workspace = SgmvWorkspace(plan, modules, pool, self.table, lists, self.split, handover)
        workspace.poison()
        counts = write_lists(plan, batch.segments, self.ranks, inputs.host["lists"], step)
        inputs.copy(8)
        workspace.resolve()
        branches: dict[str, Branch] = {
            "none": NoAdapters(pdl=False),
            "beside": BesideBase(workspace, pdl=False),
            "after": AfterBase(workspace, counts),
            "onto": OntoBase(workspace),
        }
        attention = AttentionWorkspace.allocate(
            8, 64, shape.num_heads, shape.num_kv_heads, shape.head_dim, "cpu", num_programs=8
        )
        device = inputs.device
        hidden = model.hidden(
            device["token_ids"][:num_rows],
            torch.tensor([], dtype=torch.int64),
            device["positions"][:num_rows],
            device["kv_slots"][:num_rows],
            device["slots"][:num_rows],
            device["page_table"][:num_seqs],
            plan_attention(
                attention,
                device["context_lens"][:num_seqs],
                device["cu_query_lens"][: num_seqs + 1],
                num_rows,
            ),
            pool.view(-1, shape.num_layers, 2, PAGE_TOKENS, shape.num_kv_heads, shape.head_dim),
            branches[kind],
            lambda layer: None,
        )
        rows = device["rows"][: len(batch.sampled)]
        return model.logits(hidden[rows], torch.empty(len(rows), len(self.weights.lm_head)))


@pytest.mark.parametrize("kind", ["none", "beside", "after", "onto"])
def test_equals_the_cpus(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.loading.pack_weight", lambda weight: weight)  # as on a GPU
    make_files(tmp_path)
    both = Both(tmp_path)
    chunks = mixed_chunks(kind)
    torch.testing.assert_close(both.on_gpu(chunks, kind), both.on_cpu(chunks), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "is_full", "with_peers"),
    [
        ("none", False, True),
        ("beside", False, False),
        ("beside", False, True),
        ("beside", True, False),
        ("beside", True, True),
        ("after", True, False),
        ("after", True, True),
    ],
)
def test_two_ranks_equal_the_cpus(tmp_path: Path, kind: str, is_full: bool, with_peers: bool) -> None:
    make_files(tmp_path)
    sets: list[list[PeerSets]] = []
    if with_peers:
        shape = load_model_spec(str(tmp_path / "base")).shape
        sets = [shared_sets(2, 32, shape.hidden_size) for _ in range(2)]
        sets.append(shared_sets(2, 8, shape.vocab_size // 2))
        sets.append(shared_sets(2, 1 << 16, 1, WORD))
        sets.append(shared_sets(2, 32, 64))
    arguments = (tmp_path, kind, is_full, sets)
    # forked: importing everything anew would take most of the time
    start_processes(_check_rank, arguments, nprocs=2, start_method="fork")  # type: ignore[no-untyped-call]
    assert all(are_empty(kind) for kind in (*sets[:3], *sets[4:]))


def _check_rank(rank: int, path: Path, kind: str, is_full: bool, sets: list[list[PeerSets]]) -> None:
    """As well as alone."""
    setattr(engine.model.loading, "pack_weight", lambda weight: weight)  # noqa: B010
    torch.set_num_threads(1)
    if rank == 0:  # which sends its parts of sums from the products; the other one's go by the sums
        setattr(kernels.linear.triton, "tile_for", lambda *_: FEW_ROWS)  # noqa: B010
    join(rank, 2, str(path / "rendezvous"), "cpu")
    comm = Ranks([128, 128])
    both = Both(path, Shard(rank, 2), comm, [kind[rank] for kind in sets], is_full)
    # from the start: ranks' parts of what stands for cached keys would not fit together
    chunks = mixed_chunks(kind, ((0, 1), (0, 4), (0, 2), (0, 1)))
    with patch("kernels.linear.triton.small_linear", wraps=small_linear) as products:
        by_gpu = both.on_gpu(chunks, kind)
    num_sent = sum(call.kwargs.get("peers") is not None for call in products.call_args_list)
    num_wanted = (0 if kind == "after" else 2 * 2) + 1  # of two layers; and logits
    assert num_sent == (num_wanted if rank == 0 and sets else 0)
    by_collectives = is_full and not sets
    assert comm.num_exchanged == 4 * 2 * by_collectives  # of two layers
    torch.testing.assert_close(by_gpu, both.on_cpu(chunks), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(by_gpu, Both(path).on_cpu(chunks), rtol=1e-4, atol=1e-4)
    leave()


@pytest.mark.parametrize(("num_rows", "is_ours"), [(16, True), (32, False), (64, True), (65, False)])
def test_our_own_products_leave_room_for_the_branch_beside_them(num_rows: int, is_ours: bool) -> None:
    workspace = MagicMock()
    workspace.beside.return_value = ((torch.empty(0), False), torch.empty(0))
    x, weight = (torch.empty(rows, 4096, dtype=torch.bfloat16) for rows in (num_rows, 4096))
    BesideBase(workspace, pdl=True).linear(x, Base(weight, FusedModule(0, 4096, (4096,)), 0))
    assert workspace.beside.call_args.kwargs["leaves_room"] == is_ours


MIXED = ((0, 5), (0, 20), (17, 1), (3, 6))  # prefills from the start and behind cached keys, and a decode


def mixed_chunks(kind: str, lengths: tuple[tuple[int, int], ...] = MIXED) -> list[ScheduledChunk]:
    """`lengths`: first position and tokens of each."""
    slots = (-1, -1, -1, -1) if kind == "none" else (-1, 0, 1, 0)
    return [
        ScheduledChunk(
            str(i), start, tuple(range(i, i + length)), array("i", (4 * i, 4 * i + 1)), slot, samples=True
        )
        for i, ((start, length), slot) in enumerate(zip(lengths, slots, strict=True))
    ]
