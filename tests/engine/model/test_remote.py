"""A base model under an S3 prefix: the same weights, and no byte more than a rank needs."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import AccessDenied, InvalidRequest, ModelNotFound, Unavailable
from engine.model import weight_reader
from engine.model.digest import model_digest
from engine.model.loading import LlamaWeights, load_weights
from engine.model.remote import fetch_small_files, list_weights
from engine.model.spec import ModelSpec, load_model_spec
from engine.sharding import Shard, shard_shape
from engine.tensor_parallel.comm import ALONE, Alone, Comm
from engine.tokenizer import Tokenizer
from tests.engine.adapters import fault_proxy
from tests.engine.adapters.faults import Faults
from tests.engine.adapters.s3_servers import make_client, serve_moto, upload
from tests.tiny import make_llama

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

URI = "s3://models/base"
RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Recorder(Faults):
    """Ranges that were asked for, by key."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, range]] = []

    def take(self, key: str) -> Any:
        match = RANGE.search(key)
        if match:
            with self.lock:
                self.ranges.append((key.split()[0], range(int(match[1]), int(match[2]) + 1)))
        return super().take(key)

    def num_bytes(self, suffix: str) -> int:
        return sum(len(span) for key, span in self.ranges if key.endswith(suffix))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several files; wide enough for tensors of several pieces."""
    path = make_llama(tmp_path_factory.mktemp("base") / "base", hidden_size=96, intermediate_size=192)
    model = LlamaForCausalLM.from_pretrained(path)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="300KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[tuple[str, Recorder, S3Client]]:
    """The endpoint of a proxy that notes what is got, and a client of what is behind it."""
    recorder = Recorder()
    with serve_moto() as backend, fault_proxy.serve(recorder, backend) as endpoint:
        client = make_client(backend)
        client.create_bucket(Bucket="models")
        upload(client, base, "base")
        yield endpoint, recorder, client


@pytest.fixture
def s3(server: tuple[str, Recorder, S3Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    endpoint, recorder, _ = server
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("LORAFLEET_CACHE", str(tmp_path / "cache"))
    recorder.reset()
    recorder.ranges.clear()
    return recorder


class Swapping(Alone):
    """A rank of a group of threads."""

    def __init__(self, rank: int, mailbox: list[list[torch.Tensor]], barrier: threading.Barrier) -> None:
        self._rank, self._mailbox, self._barrier = rank, mailbox, barrier

    def swap(self, blocks: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        self._mailbox[self._rank] = list(blocks)
        self._barrier.wait(timeout=20)
        taken = [given[self._rank] for given in self._mailbox]
        self._barrier.wait(timeout=20)
        assert [len(block) for block in taken] == list(sizes)
        return taken


def load_group(spec: ModelSpec, world: int) -> list[LlamaWeights]:
    mailbox: list[list[torch.Tensor]] = [[]] * world
    barrier = threading.Barrier(world)

    def load(rank: int) -> LlamaWeights:
        comm: Comm = Swapping(rank, mailbox, barrier) if world > 1 else ALONE
        return load_weights(spec, torch.float32, shard=Shard(rank, world), comm=comm)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(load, range(world)))


def tensors(weights: LlamaWeights) -> list[torch.Tensor]:
    layers = [getattr(layer, field.name) for layer in weights.layers for field in fields(layer)]
    every = [weights.embed, weights.final_norm, weights.lm_head, *layers]
    return [tensor.to_dense() if tensor.is_mkldnn else tensor for tensor in every]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("piece_bytes", [1000, 8 << 20])
def test_ranks_get_the_same_weights_as_from_disk(
    base: Path, s3: Recorder, world: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", piece_bytes)
    remote, local = load_model_spec(URI), load_model_spec(str(base))
    for rank, weights in enumerate(load_group(remote, world)):
        want = load_weights(local, torch.float32, shard=Shard(rank, world))
        for got, expected in zip(tensors(weights), tensors(want), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_group_fetches_what_the_formula_says_and_each_linear_once(
    base: Path, s3: Recorder, world: int
) -> None:
    spec = load_model_spec(URI)
    shape = spec.shape
    files = {file.name: file.stat().st_size for file in base.glob("*.safetensors")}
    load_group(spec, world)
    norms = (2 * shape.num_layers + 1) * shape.hidden_size
    elements = 0
    for rank in range(world):
        sharded = shard_shape(shape, Shard(rank, world))
        elements += shape.vocab_size * shape.hidden_size + norms  # the embedding is whole on each rank
        elements += len(sharded.vocab) * shape.hidden_size
        for projection, part in enumerate(sharded.parts):
            in_features, out_features = shape.widths(projection)
            # of those that are split by columns 1/N of the rows is read
            out_rows = part.end - part.start if part.by_output else out_features // world
            elements += shape.num_layers * out_rows * in_features
    # the head of each file, with its header, is read beside them
    heads = world * sum(min(size, 1 << 20) for size in files.values())
    assert s3.num_bytes(".safetensors") - heads == 4 * elements
    reads = Counter(key for key, span in s3.ranges if key.endswith(".safetensors"))
    assert set(reads) == {f"/models/base/{name}" for name in files}


def test_small_files_are_fetched_once_and_weights_are_not(base: Path, s3: Recorder) -> None:
    directory = fetch_small_files(URI)
    assert not list(directory.glob("*.safetensors"))
    assert (directory / "config.json").read_bytes() == (base / "config.json").read_bytes()
    num_requests = len(s3.ranges)
    assert fetch_small_files(URI) == directory
    assert len(s3.ranges) == num_requests
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]
    assert Tokenizer.from_pretrained(URI).encode("abc") == Tokenizer.from_pretrained(str(base)).encode("abc")


def test_it_is_the_same_model_as_on_disk(base: Path, s3: Recorder) -> None:
    assert model_digest(fetch_small_files(URI), list_weights(URI)) == model_digest(base)


@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_serves_it_alike(base: Path, s3: Recorder, world: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = []
    for model, size in ((str(base), 1), (URI, world)):
        engine = Engine(EngineConfig(model=model, tensor_parallel_size=size, num_pages=60, num_threads=1))
        texts.append([output.text for output in engine.generate(["abc", "xyz"], params)])
        engine.close()
    assert texts[0] == texts[1]


def test_progress_is_told_in_bytes_and_seconds(
    s3: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_reader, "LOG_PERIOD_S", 0.0)
    with caplog.at_level("INFO", "engine.model.weight_reader"):
        weights = load_weights(load_model_spec(URI), torch.float32)
    records = [record for record in caplog.records if record.name == "engine.model.weight_reader"]
    *lines, last = [record.getMessage() for record in records]
    assert re.fullmatch(r"weights: \d+ of \d+ bytes", lines[0])
    assert re.fullmatch(rf"weights: {weights.num_bytes} bytes in \d+\.\d\d s", last)


def test_nothing_there_is_told_with_the_model(s3: Recorder) -> None:
    with pytest.raises(InvalidRequest, match=r"holds no config\.json") as caught:
        load_model_spec("s3://models/nothing")
    assert caught.value.param == "model"
    with pytest.raises(ModelNotFound):
        load_model_spec("s3://no-such-bucket/base")


def test_a_file_that_is_missing_or_broken_is_named(
    base: Path, s3: Recorder, server: tuple[str, Recorder, S3Client]
) -> None:
    client = server[2]
    for name, content in (("cut", b"\xff" * 20), ("odd", (8).to_bytes(8, "little") + b"no json!")):
        client.put_object(
            Bucket="models", Key=f"{name}/config.json", Body=(base / "config.json").read_bytes()
        )
        client.put_object(Bucket="models", Key=f"{name}/model.safetensors", Body=content)
        with pytest.raises(InvalidRequest, match=r"model\.safetensors is") as caught:
            load_weights(load_model_spec(f"s3://models/{name}"), torch.float32)
        assert caught.value.param == "model"
    client.delete_object(Bucket="models", Key="odd/model.safetensors")
    with pytest.raises(InvalidRequest, match=r"odd/model\.safetensors is missing"):
        load_weights(load_model_spec("s3://models/odd"), torch.float32)


def test_weights_that_change_under_the_reader_are_told(
    base: Path, s3: Recorder, server: tuple[str, Recorder, S3Client]
) -> None:
    client = server[2]
    client.put_object(Bucket="models", Key="changing/config.json", Body=b"{}")
    client.put_object(Bucket="models", Key="changing/model.safetensors", Body=b"before")
    (file,) = list_weights("s3://models/changing")
    client.put_object(Bucket="models", Key="changing/model.safetensors", Body=b"after!")
    with pytest.raises(Unavailable, match="changed while it was read"):
        file.read(0, 3)


def test_a_rank_that_cannot_read_its_part_is_heard(s3: Recorder) -> None:
    """Rank 0 waits for its rows in a swap meanwhile."""
    load_group(load_model_spec(URI), 1)
    of_all = {span for _, span in s3.ranges}
    s3.ranges.clear()
    load_group(load_model_spec(URI), 2)
    # what only one of two reads, the second half of something
    (key, span), *_ = [
        (key, span) for key, span in s3.ranges if span not in of_all and _is_second(span, of_all)
    ]
    s3.fail("status", f"{key} bytes={span.start}-", status=403, code="AccessDenied")
    with pytest.raises(AccessDenied):
        Engine(EngineConfig(model=URI, tensor_parallel_size=2, num_pages=60, num_threads=1))


def _is_second(span: range, spans: set[range]) -> bool:
    return any(span.stop == whole.stop and span.start > whole.start for whole in spans)
