"""The command line: `lorafleet serve | check | demo`. Parses and prints; imports the rest when needed."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

API_KEY_ENV = "LORAFLEET_API_KEY"  # of deployments.api.auth, which is imported when it is needed

_SERVE_FLAGS = (
    "model", "served_model_name", "adapter_source", "device", "num_replicas", "num_ingress_replicas",
    "tensor_parallel_size", "rank_placement", "allow_runtime_lora_updating", "allowed_lora_prefixes",
    "catalog_file",
)  # fmt: skip
_PATHS = ("model", "adapter_source", "lora_modules")  # or hub ids, or in S3
_FUTURE_PATHS = ("allowed_lora_prefixes", "catalog_file")  # need not be there yet
_ENGINE_FLAGS = {
    "dtype": str, "max_model_len": int, "pool_bytes": int, "num_pages": int, "gpu_memory_fraction": float,
    "max_num_seqs": int,
    "max_num_batched_tokens": int, "max_queued_requests": int, "max_adapters": int, "max_rank": int,
    "host_cache_bytes": int, "max_parallel_loads": int, "load_timeout_s": float, "num_threads": int,
    "disk_cache_dir": str, "disk_cache_bytes": int, "lora_sharding": str, "typical_rank": int,
}  # fmt: skip


class UsageError(Exception):
    """The user asked for something that cannot be; the message says what."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        run: int = options.run(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lorafleet", description="Serve many LoRA adapters over one base model."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="serve a base model and its adapters"))
    check = commands.add_parser("check", help="tell whether an adapter can be served")
    check.add_argument("adapter", help="directory or s3://bucket/prefix of one adapter")
    check.add_argument("--model", required=True, help="directory, hub id or s3:// prefix of the base model")
    check.add_argument("--max-rank", type=int, help="largest rank that is served")
    check.set_defaults(run=_check)
    demo = commands.add_parser("demo", help="serve a small real model with three adapters")
    demo.add_argument("--once", action="store_true", help="send three requests, print the answers and stop")
    demo.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    demo.add_argument("--num-replicas", type=int, default=1)
    demo.add_argument("--port", type=int, default=8000)
    demo.add_argument("--proxy", choices=["auto", "python", "haproxy"], default="auto")
    demo.set_defaults(run=_demo)
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", type=Path, help="YAML file with the same names; flags win over it")
    add("--model", help="directory, hub id or s3:// prefix of the base model")
    add("--served-model-name", nargs="+", action="extend",
        help="its names in requests (default: the last part of --model)")  # fmt: skip
    add("--lora-modules", nargs="+", action="extend", metavar="NAME=PATH",
        help="adapters by name: directory or s3:// prefix")  # fmt: skip
    add("--adapter-source", help="s3://bucket/prefix or directory; each sub-folder is an adapter")
    add("--num-replicas", type=int, help="engines")
    add("--num-ingress-replicas", type=int, help="HTTP front ends")
    add("--tensor-parallel-size", type=int, help="GPUs an engine")
    add("--rank-placement", help="process, or Ray actors: STRICT_PACK, PACK, SPREAD, STRICT_SPREAD")
    add("--device", choices=["cpu", "cuda"])
    add("--allow-runtime-lora-updating", action="store_true", default=None,
        help="enable /v1/load_lora_adapter and /v1/unload_lora_adapter")  # fmt: skip
    add("--allowed-lora-prefixes", nargs="+", action="extend", metavar="PREFIX",
        help="where run-time adapters may come from (default: the adapter source)")  # fmt: skip
    add("--catalog-file", help="of run-time loads and unloads (default: beside the source's adapters)")
    network = parser.add_argument_group("network")
    network.add_argument("--host", default="127.0.0.1", help="0.0.0.0 opens it to the network")
    network.add_argument("--port", type=int, default=8000)
    network.add_argument("--proxy", choices=["auto", "python", "haproxy"], default="auto")
    network.add_argument("--api-key", action="append", default=[], help="who may call; repeat for several")
    network.add_argument("--api-key-file", type=Path, help=f"one key a line; also read: {API_KEY_ENV}")
    engine = parser.add_argument_group("engine")
    for name, kind in _ENGINE_FLAGS.items():
        engine.add_argument(f"--{name.replace('_', '-')}", type=kind)
    engine.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_false", default=None)
    parser.set_defaults(run=_serve)


def app_values(options: argparse.Namespace) -> dict[str, Any]:
    """Values of AppArgs: those of the file, then those of the flags. Raises UsageError."""
    values = _read_yaml(options.config) if options.config else {}
    given = {name: getattr(options, name) for name in _SERVE_FLAGS if getattr(options, name) is not None}
    names = (*_ENGINE_FLAGS, "prefix_cache")
    engine = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    in_file = values.get("engine", {})
    # what is of another type is refused later, by its name
    values = {**values, **given, "engine": {**in_file, **engine} if isinstance(in_file, dict) else in_file}
    if options.lora_modules:
        values["lora_modules"] = dict(_name_and_path(text) for text in options.lora_modules)
    return _with_absolute_paths(values)


def _with_absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """The replicas have working directories of their own."""
    found = {name: _absolute(values[name], os.path.exists) for name in _PATHS if name in values}
    found |= {name: _absolute(values[name], _is_local) for name in _FUTURE_PATHS if name in values}
    engine = values["engine"]
    if isinstance(engine, dict) and "disk_cache_dir" in engine:
        found["engine"] = {**engine, "disk_cache_dir": _absolute(engine["disk_cache_dir"], _is_local)}
    return {**values, **found}


def _is_local(path: str) -> bool:
    return not path.startswith("s3://")


def _absolute(value: Any, is_path: Callable[[str], bool]) -> Any:
    """Also in lists and tables. What is no path of this machine stays as it is."""
    if isinstance(value, list):
        return [_absolute(item, is_path) for item in value]
    if isinstance(value, dict):
        return {name: _absolute(item, is_path) for name, item in value.items()}
    return os.path.abspath(value) if isinstance(value, str) and is_path(value) else value


def _serve(options: argparse.Namespace) -> int:
    from pydantic import ValidationError

    from deployments.api.auth import load_api_keys
    from deployments.config import AppArgs
    from deployments.launch import Listen, Server, StartFailed

    values = app_values(options)
    try:
        digests = load_api_keys(options.api_key, options.api_key_file, os.environ)
        os.environ.pop(API_KEY_ENV, None)  # no other process needs the keys
        in_file = values.get("api_key_digests", [])
        if isinstance(in_file, list):  # else it is refused below, by its name
            values["api_key_digests"] = [*in_file, *digests]
        args = AppArgs.model_validate(values)
    except ValidationError as error:
        raise UsageError(_first_problem(error)) from error
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    listen = Listen(options.host, options.port, options.proxy)
    if not args.api_key_digests:
        where = f"{listen.host}:{listen.port}"
        print(f"warning: no API key: anyone who can reach {where} can use it", file=sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Server(args, listen):
            print(f"serving {args.model_names()[0]} at {listen.url}/v1", flush=True)
            wait_for_stop()
    except StartFailed as error:
        raise UsageError(str(error)) from error
    return 0


def wait_for_stop() -> None:
    """Returns on Ctrl-C, or SIGTERM where that does the same: the normal end of a server."""
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


def _check(options: argparse.Namespace) -> int:
    from engine.adapters.check import check_adapter
    from engine.config import EngineConfig
    from engine.errors import LorafleetError

    limits = {} if options.max_rank is None else {"max_rank": options.max_rank}
    try:
        report = check_adapter(EngineConfig(model=options.model, **limits), options.adapter)
    except (LorafleetError, ValueError, OSError) as error:
        print(f"error: the base model cannot be read: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=2))
    return 0 if report["status"] == "ok" else 2


def _demo(options: argparse.Namespace) -> int:
    from deployments.demo.run import demo_server, print_ready, send_once
    from deployments.launch import Listen, StartFailed
    from engine.errors import Unavailable

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    listen = Listen(port=options.port, proxy=options.proxy)
    try:
        with demo_server(options.device, options.num_replicas, listen):
            if options.once:
                send_once(listen.url)
            else:
                print_ready(listen.url)
                wait_for_stop()
    except (StartFailed, Unavailable) as error:
        raise UsageError(str(error)) from error
    return 0


def _name_and_path(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UsageError(f"--lora-modules takes NAME=PATH, not {text!r}")
    return name, path


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"--config {path}: names and values expected")
    # a name with nothing behind it, or all of it commented out
    return {name: value for name, value in values.items() if value is not None}


def _first_problem(error: Any) -> str:
    """Of a pydantic ValidationError: one line that names the option."""
    problem = error.errors()[0]
    where = ".".join(map(str, problem["loc"]))
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


if __name__ == "__main__":
    sys.exit(main())
