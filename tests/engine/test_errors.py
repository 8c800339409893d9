from __future__ import annotations

import pickle
import re

import pytest

from engine import errors
from engine.errors import AdapterRefused, LorafleetError, Overloaded, Unavailable


def subclasses(cls: type[LorafleetError]) -> list[type[LorafleetError]]:
    return [c for sub in cls.__subclasses__() for c in (sub, *subclasses(sub))]


ALL: list[type[LorafleetError]] = [LorafleetError, *subclasses(LorafleetError)]


def test_the_tree_in_the_docstring_is_the_real_one() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"[├└]── (\w+) +(\d+)", errors.__doc__)
    assert drawn == [(c.__name__, str(c.status)) for c in ALL[1:]]


@pytest.mark.parametrize("cls", ALL)
def test_an_error_crosses_processes_whole(cls: type[LorafleetError]) -> None:
    error = cls("what happened", param="r", code="odd", retry_after_s=1.5)
    for copy in (LorafleetError.from_dict(error.to_dict()), pickle.loads(pickle.dumps(error))):
        assert type(copy) is cls
        assert str(copy) == "what happened"
        assert copy.to_dict() == error.to_dict()


def test_an_error_of_another_version_is_still_an_error() -> None:
    error = LorafleetError.from_dict({**Overloaded("full").to_dict(), "class": "FromTheFuture"})
    assert type(error) is LorafleetError
    assert error.message == "full"


@pytest.mark.parametrize("cls", ALL[1:])
def test_every_cause_has_a_code_and_every_status_a_type(cls: type[LorafleetError]) -> None:
    body = cls("m").body()
    assert body["code"]
    assert body["type"] != "server_error" or cls.status >= 500


def test_the_body_is_an_openai_error_object() -> None:
    assert AdapterRefused("r is 512", param="r").body() == {
        "message": "r is 512",
        "type": "invalid_request_error",
        "param": "r",
        "code": "adapter_refused",
    }
    assert Unavailable("later", code="loading").body()["code"] == "loading"
