"""Adapters read by a real process of their own, from directories and from moto."""

from __future__ import annotations

import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from engine.adapters import remote_reader
from engine.adapters.host_memory import HostArena
from engine.adapters.image import AdapterImage, ImageFormat
from engine.adapters.image_reader import WantedImage
from engine.adapters.load_process import NICENESS
from engine.adapters.loader import AdapterLoader, LoadResult
from engine.adapters.loading import load_image
from engine.adapters.remote_reader import RemoteReader
from engine.adapters.source import describe
from engine.config import EngineConfig
from engine.errors import AdapterRefused, InvalidRequest, LorafleetError, Unavailable
from engine.request import AdapterRef
from engine.shape import PROJECTIONS
from engine.wire import encode_frame
from tests.engine.adapters import fault_proxy, reading_process
from tests.engine.adapters.adapter_dirs import (
    FORMAT,
    all_elements,
    lora_tensors,
    tensor_name,
    write_adapter,
)
from tests.engine.adapters.faults import Faults
from tests.engine.adapters.s3_servers import make_client, serve_moto, upload

pytestmark = pytest.mark.cluster

WAIT_S = 30.0  # for what must come; a test that passes does not wait so long
URI = "s3://models/adapters/sql"
CONFIG = EngineConfig(model="unused")
REST = "safetensors bytes=1048576-"  # of the weights, when their head was read


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights are read in two parts."""
    path = tmp_path_factory.mktemp("adapters") / "sql"
    tensors = lora_tensors(rank=256, projections=PROJECTIONS)
    write_adapter(path, tensors, {"peft_type": "LORA", "r": 256})
    assert (path / "adapter_model.safetensors").stat().st_size > 2 << 20
    return path


@pytest.fixture(scope="module")
def moto(adapter: Path) -> Iterator[str]:
    with serve_moto() as endpoint:
        client = make_client(endpoint)
        client.create_bucket(Bucket="models")
        upload(client, adapter, "adapters/sql")
        yield endpoint


@contextmanager
def serve(moto: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """For processes that start meanwhile. The end breaks off what stalls."""
    proxy = Faults()
    with fault_proxy.serve(proxy, moto) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield proxy


class Gone(Exception):
    """What a check raises here when nobody wants the load."""


@dataclass
class Read:
    """One load, on a thread of its own."""

    reader: RemoteReader
    form: ImageFormat
    uri: str
    version: str | None = None
    image: AdapterImage | None = None
    error: Exception | None = None
    is_over: bool = False
    num_moved: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def start(self) -> Read:
        threading.Thread(target=self._run).start()
        return self

    def result(self) -> AdapterImage:
        assert self.done.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        assert self.image is not None
        return self.image

    def _run(self) -> None:
        try:
            wanted = WantedImage(self.uri, self.version, self.form, self._check, lambda: self.is_over)
            self.image = self.reader.read(wanted)
        except Exception as error:
            self.error = error.with_traceback(None)  # its frames have pages
        self.done.set()

    def _check(self) -> None:
        if self.is_over:
            raise Gone
        self.num_moved += 1


class Fleet:
    """A reader, and an arena of one slab."""

    def __init__(self, config: EngineConfig = CONFIG) -> None:
        self.arena = HostArena(FORMAT.page_elems, FORMAT.dtype)
        self.form = replace(FORMAT, arena=self.arena)
        self.reader = RemoteReader(config)

    def start(self, uri: Path | str, version: str | None = None) -> Read:
        return Read(self.reader, self.form, str(uri), version).start()

    def read(self, uri: Path | str, version: str | None = None) -> AdapterImage:
        return self.start(uri, version).result()

    @property
    def num_taken(self) -> int:
        """Pages that are not free."""
        num_slabs = self.arena.num_bytes // self.arena.file.slab_bytes
        return num_slabs * self.arena.file.pages_per_slab - len(self.arena._free)


@pytest.fixture
def make_fleet() -> Iterator[Callable[..., Fleet]]:
    fleets: list[Fleet] = []

    def make(config: EngineConfig = CONFIG) -> Fleet:
        fleets.append(Fleet(config))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.reader.close()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """For all who leave it as they found it."""
    fleet = Fleet()
    yield fleet
    fleet.reader.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_same(image: AdapterImage, uri: Path | str) -> None:
    """As one that is read in this process."""
    want = load_image(str(uri), FORMAT)
    assert torch.equal(all_elements(image), all_elements(want))
    for name in ("tile_offsets", "ranks", "scales"):
        got, expected = getattr(image, name), getattr(want, name)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    for name in ("digest", "report", "chat_template", "is_from_disk", "num_pages", "nbytes", "rank"):
        assert getattr(image, name) == getattr(want, name)


def test_an_image_is_byte_for_byte_that_of_this_process(fleet: Fleet, adapter: Path, tmp_path: Path) -> None:
    assert_same(fleet.read(adapter), adapter)
    template = write_adapter(tmp_path / "b", files={"chat_template.jinja": "{{ messages }}"})
    assert_same(fleet.read(template), template)


def test_directories_are_read_without_boto3(
    make_fleet: Callable[..., Fleet], adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "boto3.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fleet = make_fleet()
    assert_same(fleet.read(adapter), adapter)
    with pytest.raises(LorafleetError):
        fleet.read(URI)


@pytest.mark.gpu
def test_pages_for_a_device_are_locked_and_copied_as_they_are(
    make_fleet: Callable[..., Fleet], adapter: Path
) -> None:
    fleet = make_fleet()
    arena = HostArena(FORMAT.page_elems, FORMAT.dtype, is_pinned=True)
    arena.reserve(1).join()
    fleet.form = replace(FORMAT, arena=arena)
    image = fleet.read(adapter)
    assert all(page.is_pinned() for page in image.pages)
    copies = [page.to("cuda", non_blocking=True) for page in image.pages]
    torch.cuda.synchronize()
    assert torch.equal(torch.cat(copies).cpu(), all_elements(image))
    assert_same(image, adapter)


def test_images_at_once_share_no_page(fleet: Fleet, adapter: Path, tmp_path: Path) -> None:
    small = [
        write_adapter(tmp_path / str(rank), lora_tensors(rank=rank), {"peft_type": "LORA", "r": rank})
        for rank in range(1, 7)
    ]
    paths = [adapter, *small] * 3
    reads = [fleet.start(path) for path in paths]
    images = [read.result() for read in reads]
    for image, path in zip(images, paths, strict=True):
        assert_same(image, path)
    numbers = [number for image in images for number in image.pages.numbers]
    assert len(numbers) == len(set(numbers))


def test_dropped_images_leave_their_pages(fleet: Fleet, adapter: Path) -> None:
    before = fleet.num_taken
    image = fleet.read(adapter)
    assert fleet.num_taken == before + image.num_pages
    del image
    until(lambda: fleet.num_taken == before)


def test_errors_are_those_of_this_process(fleet: Fleet, tmp_path: Path) -> None:
    """Also one that is noticed when pages are half full, and these come back."""
    before = fleet.num_taken
    name = tensor_name(1, "v_proj", "B")
    values = lora_tensors()
    values[name][3, 3] = float("inf")
    for path in (
        tmp_path / "none",
        write_adapter(tmp_path / "config", config="{"),
        write_adapter(tmp_path / "dora", config={"peft_type": "LORA", "r": 8, "use_dora": True}),
        write_adapter(tmp_path / "values", values),
    ):
        with pytest.raises(LorafleetError) as expected:
            load_image(str(path), FORMAT)
        with pytest.raises(type(expected.value)) as caught:
            fleet.read(path)
        assert caught.value.to_dict() == expected.value.to_dict()
    assert expected.value.param == name
    until(lambda: fleet.num_taken == before)


def test_a_fault_of_ours_is_told_without_its_details(
    make_fleet: Callable[..., Fleet], adapter: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fleet = make_fleet()
    fleet.form = replace(fleet.form, max_rank="no number")  # type: ignore[arg-type]
    with pytest.raises(LorafleetError) as caught:
        fleet.read(adapter)
    assert caught.value.message == "internal error while the adapter was loaded"
    assert "TypeError" in capfd.readouterr().err  # it is in the log


def test_an_adapter_in_s3(
    make_fleet: Callable[..., Fleet], moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(moto, monkeypatch):
        assert_same(make_fleet().read(URI), URI)


def test_a_load_that_stalls_lends_its_place_to_another_and_ends_at_its_deadline(
    moto: str, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: queue.Queue[LoadResult] = queue.Queue()
    config = replace(CONFIG, max_parallel_loads=1, load_timeout_s=8.0)
    with serve(moto, monkeypatch) as proxy:
        proxy.fail("stall", REST, keep=1000, seconds=WAIT_S)
        form = replace(FORMAT, arena=HostArena(FORMAT.page_elems, FORMAT.dtype))
        loader = AdapterLoader(form, config, results.put, reader=RemoteReader(config))
        loader.submit(AdapterRef("slow", URI, "1"))
        loader.submit(AdapterRef("fast", str(adapter), "1"))
        first, second = results.get(timeout=WAIT_S), results.get(timeout=WAIT_S)
        loader.close()
    assert (first.ref.name, first.error) == ("fast", None)
    assert isinstance(second.error, Unavailable)
    assert "8 s" in second.error.message


def test_a_stalled_read_tells_no_progress_and_keeps_its_pages_when_it_is_given_up(
    make_fleet: Callable[..., Fleet], moto: str, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(moto, monkeypatch) as proxy:
        fleet = make_fleet()
        proxy.fail("stall", REST, keep=1000, seconds=WAIT_S)
        read = fleet.start(URI)
        until(lambda: fleet.num_taken > 0 and proxy.num_met > 0)
        time.sleep(0.5)  # what had moved before is told by now
        held, moved = fleet.num_taken, read.num_moved
        time.sleep(1.2)
        assert read.num_moved == moved > 0
        began = time.monotonic()
        read.is_over = True
        with pytest.raises(Unavailable):
            read.result()
        assert time.monotonic() - began < 1.0
        others = fleet.read(adapter)  # reads go on
        assert fleet.num_taken == held + others.num_pages
        del others
    until(lambda: fleet.num_taken == 0)


def test_what_a_check_raises_ends_the_read(
    make_fleet: Callable[..., Fleet], moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(moto, monkeypatch) as proxy:
        fleet = make_fleet()
        proxy.fail("slow", REST, seconds=WAIT_S)
        read = fleet.start(URI)
        until(lambda: read.num_moved > 0)
        read.is_over = True
        with pytest.raises((Gone, Unavailable)):
            read.result()


def test_a_process_that_is_killed_in_a_load_is_followed_by_another(
    make_fleet: Callable[..., Fleet], moto: str, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(moto, monkeypatch) as proxy:
        fleet = make_fleet()
        proxy.fail("stall", REST, keep=1000, seconds=WAIT_S)
        read = fleet.start(URI)
        until(lambda: fleet.num_taken > 0 and proxy.num_met > 0)
        killed = fleet.reader.pid
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(Unavailable) as caught:
            read.result()
        assert caught.value.retry_after_s is not None
        del read
        until(lambda: fleet.num_taken == 0)
        assert_same(fleet.read(adapter), adapter)
        assert fleet.reader.pid != killed
        assert not Path(f"/proc/{killed}").exists()  # no zombie


def test_a_process_that_hangs_is_ended(make_fleet: Callable[..., Fleet], adapter: Path) -> None:
    fleet = make_fleet(replace(CONFIG, heartbeat_timeout_s=1.5))
    fleet.read(adapter)
    os.kill(fleet.reader.pid, signal.SIGSTOP)
    with pytest.raises(Unavailable):
        fleet.read(adapter)
    assert_same(fleet.read(adapter), adapter)


def test_a_process_that_keeps_ending_is_not_started_all_the_time(
    make_fleet: Callable[..., Fleet], adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    fleet = make_fleet()
    pids = set()
    errors = []
    for _ in range(100):
        with pytest.raises(Unavailable) as caught:
            fleet.read(adapter)
        pids.add(fleet.reader.pid)
        errors.append(caught.value)
    assert len(pids) <= 3
    assert all(error.retry_after_s is not None for error in errors)
    assert "keeps ending" in errors[-1].message
    assert fleet.reader.is_resting
    monkeypatch.undo()

    def is_well() -> bool:
        read = fleet.start(adapter)
        return read.done.wait(WAIT_S) and read.error is None

    until(is_well)
    assert not fleet.reader.is_resting


@pytest.mark.parametrize("said", [b"", encode_frame(["ready"]) + b"part"])
def test_a_process_that_hangs_before_or_in_a_word_is_ended(
    said: bytes, make_fleet: Callable[..., Fleet], adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = adapter.parent / "hangs"
    script.write_text(
        f"#!{sys.executable}\nimport socket, sys, time\n"
        f"sock = socket.socket(fileno=int(sys.argv[3]))\nsock.sendall({said!r})\ntime.sleep(100)\n"
    )
    script.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(script))
        patch.setattr(remote_reader, "START_TIMEOUT_S", 1.5)
        fleet = make_fleet(replace(CONFIG, heartbeat_timeout_s=2.5))
        read = fleet.start(adapter)
        assert read.done.wait(10.0)
        assert isinstance(read.error, Unavailable)
    assert_same(fleet.read(adapter), adapter)


def test_ctrl_c_is_not_for_it_and_the_step_loop_goes_first(fleet: Fleet, adapter: Path) -> None:
    fleet.read(adapter)
    pid = fleet.reader.pid
    os.kill(pid, signal.SIGINT)
    fleet.read(adapter)
    assert fleet.reader.pid == pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + NICENESS


def test_it_ends_with_a_parent_that_is_killed(adapter: Path) -> None:
    command = [sys.executable, "-m", reading_process.__name__, str(adapter)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        parent.kill()
    until(lambda: not lives(pid))


def lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # nobody may have waited for it


def test_versions_on_disk_are_read_without_s3(
    make_fleet: Callable[..., Fleet], moto: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = replace(CONFIG, disk_cache_dir=str(tmp_path / "disk"))
    with serve(moto, monkeypatch):
        version = describe(URI).version
        first = make_fleet(config)
        image = first.read(URI, version)
        assert not image.is_from_disk
        first.reader.close()  # which writes what is pending
    again = make_fleet(config).read(URI, version)
    assert again.is_from_disk
    assert torch.equal(all_elements(again), all_elements(image))


def test_a_disk_that_cannot_be_used_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest) as caught:
        RemoteReader(replace(CONFIG, disk_cache_dir=str(tmp_path / "file" / "disk")))
    assert caught.value.param == "disk_cache_dir"


def test_closing_in_mid_load_leaves_nothing(
    moto: str, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, threads = open_files(), set(threading.enumerate())
    with serve(moto, monkeypatch) as proxy:
        fleet = Fleet()
        fleet.read(adapter)
        proxy.fail("stall", REST, keep=1000, seconds=WAIT_S)
        read = fleet.start(URI)
        until(lambda: proxy.num_met > 0)
        pid = fleet.reader.pid
        fleet.reader.close()
        with pytest.raises(Unavailable):
            read.result()
        with pytest.raises(Unavailable):
            fleet.read(adapter)
        assert not Path(f"/proc/{pid}").exists()
        del read, fleet
    gc.collect()  # errors and what they were raised in
    until(lambda: set(threading.enumerate()) <= threads)
    until(lambda: open_files() <= files)


def open_files() -> set[str]:
    """Of this process: paths, and the numbers of sockets."""
    files = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one of the listing itself
            files.add(str(fd.readlink()))
    return files - {f"/proc/{os.getpid()}/fd"}


def test_refusals_of_values_name_the_tensor(fleet: Fleet, tmp_path: Path) -> None:
    tensors = lora_tensors()
    name = tensor_name(0, "q_proj", "A")
    tensors[name][0, 0] = float("nan")
    with pytest.raises(AdapterRefused) as caught:
        fleet.read(write_adapter(tmp_path / "nan", tensors))
    assert caught.value.param == name
