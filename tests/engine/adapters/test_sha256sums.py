from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.adapters.sha256sums import parse_sums
from engine.errors import AdapterRefused

A, B = "a" * 64, "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("content", "sums"),
    [
        ("", {}),
        (f"{A}  x.json\n", {"x.json": A}),
        (f"{A} *x.json\r\n\n{B}  ./y z", {"x.json": A, "y z": B}),
        (f"{A.upper()}  x\n", {"x": A}),
        (f"{A}  sub/x\n", {"sub/x": A}),
        (f"{A}  x\n{B}  x\n", {"x": B}),
    ],
)
def test_lines_are_digests_and_names(content: str, sums: dict[str, str]) -> None:
    assert parse_sums(content.encode()) == sums


@pytest.mark.parametrize(
    "content", [b"x", b"\xff\xfe", f"{A}".encode(), f"{A[1:]}  x".encode(), f"{'g' * 64}  x".encode()]
)
def test_what_sha256sum_does_not_write_is_refused(content: bytes) -> None:
    with pytest.raises(AdapterRefused) as caught:
        parse_sums(content)
    assert caught.value.param == "SHA256SUMS"


def test_it_reads_what_sha256sum_writes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    line = subprocess.run(["sha256sum", "x"], cwd=tmp_path, check=True, capture_output=True).stdout
    assert parse_sums(line) == {"x": "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"}
