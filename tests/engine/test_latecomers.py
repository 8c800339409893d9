from __future__ import annotations

from engine.latecomers import LATE_S, Latecomers


def test_who_asks_is_late_for_a_while_unless_it_has_begun_again() -> None:
    late = Latecomers()
    assert not late.is_late("a", 0.0)
    late.expect("a", 0.0)
    late.expect("b", 1.0)
    assert late.is_late("a", LATE_S - 0.1)
    assert not late.is_late("a", LATE_S)
    late.discard("b")
    assert not late.is_late("b", 1.0)


def test_the_last_end_counts() -> None:
    late = Latecomers()
    late.expect("a", 0.0)
    late.expect("b", 0.0)
    late.expect("a", 5.0)
    assert late.is_late("a", LATE_S)


def test_what_is_over_is_forgotten() -> None:
    late = Latecomers()
    for number in range(1000):
        late.expect(number, float(number))
    assert len(late) == LATE_S
