from __future__ import annotations

import pytest

from engine.adapters.names import check_adapter_name, is_adapter_name, is_folder_name
from engine.errors import InvalidRequest

GOOD = ["a", "0", "sql", "Sql-v2.1_final", "a..b", "_a", "org/name", "x" * 128]
BAD = [
    "", ".", "..", "../../etc/x", "/etc/x", "a//b", "a/", "a/../b", "a/.b", "a\\b", "%2e%2e/",
    ".hidden", "-a", "a b", "a\n", "\na", "a\0", "a:b", "é", "a\u2024b", "１", "x" * 129,
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_name_of_the_grammar_is_accepted(name: str) -> None:
    assert is_adapter_name(name)
    check_adapter_name(name, param="model")


@pytest.mark.parametrize("name", BAD)
def test_any_other_name_is_a_400_that_names_the_field(name: str) -> None:
    """FR-30."""
    assert not is_adapter_name(name)
    with pytest.raises(InvalidRequest) as caught:
        check_adapter_name(name, param="lora_name")
    assert caught.value.status == 400
    assert caught.value.param == "lora_name"


def test_a_source_holds_names_of_one_part() -> None:
    assert is_folder_name("name")
    assert not is_folder_name("org/name")
    assert not is_folder_name("_base"), "it would be counted as the base model"
