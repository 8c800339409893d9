"""The command line: what it reads, what it refuses, how fast it helps."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deployments import cli
from deployments.api.auth import digest_key
from deployments.config import AppArgs
from deployments.launch import Listen

HEAVY = ("torch", "ray", "transformers", "boto3", "fastapi", "pydantic")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[AppArgs, Listen]]:
    """What would have been started."""
    calls: list[tuple[AppArgs, Listen]] = []

    class FakeServer:
        def __init__(self, args: AppArgs, listen: Listen) -> None:
            calls.append((args, listen))

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("deployments.launch.Server", FakeServer)
    monkeypatch.setattr(cli, "wait_for_stop", lambda: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.delenv("LORAFLEET_API_KEY", raising=False)
    return calls


Started = list[tuple[AppArgs, Listen]]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from deployments.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_flags_become_arguments(started: Started, tmp_path: Path) -> None:
    argv = [
        "serve", "--model", "org/m", "--adapter-source", "s3://b/p", "--num-replicas", "2",
        "--lora-modules", "a=s3://b/a", "b=s3://b/b", "--max-num-seqs", "4", "--pool-bytes", "1048576",
        "--gpu-memory-fraction", "0.5", "--no-prefix-cache", "--allow-runtime-lora-updating",
        "--host", "0.0.0.0", "--port", "9000", "--served-model-name", "m", "mm",
    ]  # fmt: skip
    assert cli.main(argv) == 0
    ((args, listen),) = started
    assert args.lora_modules == {"a": "s3://b/a", "b": "s3://b/b"}
    assert args.adapter_source == "s3://b/p"
    assert args.engine == {
        "max_num_seqs": 4, "pool_bytes": 1048576, "gpu_memory_fraction": 0.5, "prefix_cache": False,
    }  # fmt: skip
    assert (args.num_replicas, args.allow_runtime_lora_updating) == (2, True)
    assert args.model_names() == ("m", "mm")
    assert (listen.host, listen.port) == ("0.0.0.0", 9000)


def test_sigterm_ends_a_server_in_good_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pause() -> None:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal went elsewhere")

    monkeypatch.setattr(signal, "pause", pause)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        cli.wait_for_stop()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_flags_win_over_the_file(started: Started, tmp_path: Path) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text("model: org/m\nnum_replicas: 3\nengine: {max_num_seqs: 4, max_adapters: 8}\n")
    assert cli.main(["serve", "--config", str(config), "--num-replicas", "1", "--max-num-seqs", "2"]) == 0
    ((args, _),) = started
    assert (args.model, args.num_replicas) == ("org/m", 1)
    assert args.engine == {"max_num_seqs": 2, "max_adapters": 8}


def test_local_paths_become_absolute(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas have working directories of their own."""
    (tmp_path / "adapters").mkdir()
    monkeypatch.chdir(tmp_path)
    cli.main(["serve", "--model", "org/m", "--adapter-source", "adapters", "--lora-modules", "a=adapters"])
    ((args, _),) = started
    assert args.adapter_source == str(tmp_path / "adapters")
    assert args.lora_modules == {"a": str(tmp_path / "adapters")}
    assert args.model == "org/m"


def test_paths_that_are_still_to_be_made_become_absolute_too(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FR-59: the catalog's file would else be where nobody looks after a restart."""
    (tmp_path / "adapters").mkdir()
    monkeypatch.chdir(tmp_path)
    flags = ["--catalog-file", "new/catalog.json", "--disk-cache-dir", "cache"]
    prefixes = ["--allowed-lora-prefixes", "adapters", "later", "s3://bucket/prefix"]
    assert cli.main(["serve", "--model", "org/m", *flags, *prefixes]) == 0
    ((args, _),) = started
    assert args.catalog_file == tmp_path / "new" / "catalog.json"
    assert args.engine["disk_cache_dir"] == str(tmp_path / "cache")
    local = [str(tmp_path / "adapters"), str(tmp_path / "later")]
    assert args.allowed_lora_prefixes == [*local, "s3://bucket/prefix"]


def test_names_without_a_value_in_the_file_are_not_given(started: Started, tmp_path: Path) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text("model: org/m\nengine:\n  # max_num_seqs: 4\nlora_modules:\nadapter_source:\n")
    assert cli.main(["serve", "--config", str(config)]) == 0
    ((args, _),) = started
    assert (args.model, args.engine, args.lora_modules, args.adapter_source) == ("org/m", {}, {}, None)


@pytest.mark.parametrize(
    "line",
    [
        "engine: 5", "lora_modules: [sql]", "adapter_source: 5", "catalog_file: [a]", "model: {a: b}",
        "api_key_digests: 5", "allowed_lora_prefixes: 5", "7: a",
    ],
)  # fmt: skip
def test_values_of_another_type_in_the_file_are_refused_by_name(
    started: Started, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text(line if line.startswith("model") else f"model: org/m\n{line}\n")
    assert cli.main(["serve", "--config", str(config)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {line.partition(':')[0]}")
    assert not started


def test_keys_are_kept_as_digests_and_never_printed(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("from-file\n")
    monkeypatch.setenv("LORAFLEET_API_KEY", "from-env")
    argv = ["serve", "--model", "m", "--api-key", "one", "--api-key", "two", "--api-key-file", str(keys)]
    assert cli.main(argv) == 0
    ((args, _),) = started
    assert set(args.api_key_digests) == set(map(digest_key, ("one", "two", "from-env", "from-file")))
    printed = "".join(capsys.readouterr())
    assert "warning" not in printed
    assert not any(key in printed for key in ("one", "two", "from-env", "from-file"))


@pytest.mark.parametrize("in_file", ["[]", f"['{'0' * 64}']"])
def test_a_file_with_digests_of_its_own_closes_no_key_out(
    started: Started, tmp_path: Path, in_file: str
) -> None:
    """Our examples hold an empty list: with one of them a server that was given a key would be open."""
    config = tmp_path / "fleet.yaml"
    config.write_text(f"model: m\napi_key_digests: {in_file}\n")
    assert cli.main(["serve", "--config", str(config), "--api-key", "one"]) == 0
    ((args, _),) = started
    assert args.api_key_digests[-1] == digest_key("one")
    assert len(args.api_key_digests) == (1 if in_file == "[]" else 2)


def test_an_open_server_is_warned_about(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["serve", "--model", "m", "--port", "8123"])
    assert "warning: no API key: anyone who can reach 127.0.0.1:8123 can use it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve"], "model: Field required"),
        (["serve", "--model", "m", "--tensor-parallel-size", "0"], "tensor_parallel_size"),
        (["serve", "--model", "m", "--max-num-seqs", "0"], "max_num_seqs must be positive"),
        (["serve", "--model", "m", "--lora-modules", "sql"], "--lora-modules takes NAME=PATH"),
        (["serve", "--model", "m", "--api-key", ""], "an API key must not be empty"),
        (["serve", "--model", "m", "--api-key-file", "/none"], "/none"),
        (["serve", "--config", "/none.yaml"], "/none.yaml"),
    ],
)
def test_a_mistake_ends_with_its_reason(
    argv: list[str], message: str, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    assert message in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize(
    ("report", "code"),
    [({"status": "ok", "rank": 8}, 0), ({"status": "refused", "error": {"param": "use_dora"}}, 2)],
)
def test_check_prints_the_report_and_nothing_else(
    report: dict[str, Any], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.adapters.check.check_adapter", lambda config, uri: report)
    assert cli.main(["check", "--model", "m", "adapter"]) == code
    assert json.loads(capsys.readouterr().out) == report


def test_check_tells_a_bad_base_model_from_a_bad_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--model", "/no/such/model", "adapter"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "base model" in printed.err
