"""A fleet to disturb: two replicas of a tiny random model, adapters in an S3 behind a link that can fail."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deployments.demo.s3 import EmbeddedS3
from load_tests.harness.client import Target
from load_tests.harness.faulty_link import FaultyLink
from tests.cluster.serve_process import ENGINE, ServeProcess, serving

NUM_ADAPTERS = 32
NUM_SLOTS = 8  # of each replica
BUCKET = "adapters"
WEIGHTS = "adapter_model.safetensors"
# 512 pages; an adapter takes five, and host memory holds a dozen
POOL_BYTES, HOST_CACHE_BYTES = 4 << 20, 512 << 10


@dataclass(frozen=True, slots=True)
class TinyFleet:
    server: ServeProcess
    link: FaultyLink  # between the replicas and S3
    target: Target

    def kill_an_engine(self) -> None:
        os.kill(self.server.pids(ENGINE)[0], signal.SIGKILL)

    def load(self, adapter: int, version_of: int, canary_weight: float | None = None) -> None:
        """Another adapter's weights as a version of this one, for all of its requests or for a part."""
        body: dict[str, object] = {
            "lora_name": self.target.adapters[adapter],
            "lora_path": f"s3://{BUCKET}/source/{self.target.adapters[version_of]}",
        }
        body |= {"load_inplace": True} if canary_weight is None else {"canary_weight": canary_weight}
        answer = self.server.call("/v1/load_lora_adapter", body)
        assert answer.status == 200, answer.body


@contextmanager
def tiny_fleet(extra_flags: Sequence[str] = ()) -> Iterator[TinyFleet]:
    # takes seconds to import, and whoever only plans needs it not
    from safetensors.torch import load_file, save_file

    from tests.tiny import ALL_LINEAR, make_adapter, make_llama

    names = tuple(f"adapter-{number:02}" for number in range(NUM_ADAPTERS))
    with tempfile.TemporaryDirectory() as folder, EmbeddedS3() as s3, FaultyLink(s3.port) as link:
        base = make_llama(Path(folder) / "base")
        made = make_adapter(base, Path(folder) / "source" / names[0], rank=4, targets=ALL_LINEAR, seed=0)
        weights = load_file(made / WEIGHTS)
        for number, name in enumerate(names[1:], start=2):
            shutil.copytree(made, made.with_name(name))
            save_file(
                {key: weight * number for key, weight in weights.items()}, made.with_name(name) / WEIGHTS
            )
        source = s3.upload(made.parent, BUCKET, "source")
        flags = [
            "--model", str(base), "--adapter-source", source, "--num-replicas", "2", "--proxy", "python",
            "--pool-bytes", str(POOL_BYTES), "--host-cache-bytes", str(HOST_CACHE_BYTES),
            "--max-adapters", str(NUM_SLOTS), "--max-num-seqs", "16", "--allow-runtime-lora-updating",
            *extra_flags,
        ]  # fmt: skip
        environment = {**s3.env, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{link.port}"}
        with serving(flags, environment) as server:
            yield TinyFleet(server, link, Target(server.url, names, timeout_s=60.0))
