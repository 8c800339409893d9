"""Parts of tensors arrive where they belong, in pieces; errors come out; a terminal sees a bar."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from engine.errors import Unavailable
from engine.model import weight_reader
from engine.model.weight_reader import Progress, WeightReader, wait


class Stored:
    """A tensor of which reads are noted, and may be held up or fail."""

    def __init__(self, tensor: torch.Tensor, gate: threading.Event | None = None) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.reads: list[range] = []
        self.error: Exception | None = None
        self._tensor = tensor
        self._gate = gate

    def read(self, rows: slice, columns: slice | None = None) -> torch.Tensor:
        if self._gate is not None:
            assert self._gate.wait(10)
        if self.error is not None:
            raise self.error
        self.reads.append(range(*rows.indices(self.shape[0])))
        return self._tensor[rows] if columns is None else self._tensor[rows, columns]


def test_pieces_cover_the_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", 3 * 8 * 4)
    stored = Stored(torch.randn(50, 16))
    target = torch.full((17, 8), torch.nan, dtype=torch.bfloat16)
    with WeightReader("weights", 4) as reader:
        wait(reader.start(stored, target, range(20, 37), slice(8, 16)))
        assert reader.progress.num_bytes == 17 * 8 * 4
    assert torch.equal(target, stored._tensor[20:37, 8:16].to(torch.bfloat16))
    assert sorted(row for rows in stored.reads for row in rows) == list(range(20, 37))
    assert max(map(len, stored.reads)) == 3


def test_an_error_ends_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", 4)
    gate = threading.Event()
    broken, held = Stored(torch.zeros(1)), Stored(torch.zeros(100), gate)
    broken.error = Unavailable("S3 is away")
    with pytest.raises(Unavailable):
        _read_both(broken, held, gate)
    assert len(held.reads) < 100


def _read_both(broken: Stored, held: Stored, gate: threading.Event) -> None:
    target = torch.zeros(100)
    with WeightReader("weights", 2) as reader:
        first = reader.start(broken, target, range(1))
        reader.start(held, target, range(100))
        try:
            wait(first)
        finally:
            gate.set()


def test_a_terminal_sees_a_bar_and_a_log_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = Progress("weights of rank 1")
    shown.expect(2 << 20)
    shown.add(1 << 20)
    shown.close()
    assert "weights of rank 1:  50%" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    silent = Progress("weights")
    silent.add(1)
    silent.close()
    assert capsys.readouterr().err == ""
