"""Eight streams over the three demo adapters on one CPU, beside transformers + PEFT in the same run.

    python -m load_tests.cpu_vs_peft [--out load_tests/results/cpu_vs_peft.json]

Arrival: all eight at once. Popularity: the three adapters in turn. Prompts: the demo's showcases. Output:
64 tokens each, greedy, EOS ignored. PEFT runs one request after another and switches the adapter for each, as
its users do; its KV cache is on. Rounds of the two alternate; tokens per second are of the median round.
Fails if ours is less than 3 times theirs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.demo.base_model import prepare_base_model
from deployments.demo.prompts import ADAPTERS_DIR, SHOWCASES
from engine import Engine, EngineConfig, SamplingParams
from load_tests.conditions import machine

NUM_STREAMS = 8
NUM_TOKENS = 64
NUM_ROUNDS = 3
REQUIRED_RATIO = 3.0

Request = tuple[str, list[int]]  # adapter, prompt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    model = prepare_base_model()
    requests = _requests(model)
    run_ours, run_peft = _ours(model), _peft(model)
    run_ours(requests)  # warm-up; also loads the adapters
    run_peft(requests[:1])
    ours, peft = [], []
    for _ in range(NUM_ROUNDS):
        ours.append(_seconds(run_ours, requests))
        peft.append(_seconds(run_peft, requests))
    result = _result(ours, peft)
    print(json.dumps(result, indent=2))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["ratio"] >= REQUIRED_RATIO else 1


def _requests(model: Path) -> list[Request]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    requests = []
    for i in range(NUM_STREAMS):
        showcase = SHOWCASES[i % len(SHOWCASES)]
        messages = [{"role": "user", "content": showcase.prompt}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        requests.append((showcase.adapter, tokenizer.encode(text, add_special_tokens=False)))
    return requests


def _ours(model: Path) -> Callable[[list[Request]], None]:
    # without the prefix cache: repeated rounds must compute their prompts as PEFT does
    engine = Engine(EngineConfig(model=str(model), prefix_cache=False))
    for showcase in SHOWCASES:
        engine.load_adapter(showcase.adapter, str(ADAPTERS_DIR / showcase.adapter))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

    def run(requests: list[Request]) -> None:
        outputs = engine.generate([tokens for _, tokens in requests], params, [name for name, _ in requests])
        assert all(len(output.token_ids) == NUM_TOKENS for output in outputs)

    return run


def _peft(model: Path) -> Callable[[list[Request]], None]:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    names = [showcase.adapter for showcase in SHOWCASES]
    peft_model = PeftModel.from_pretrained(base, ADAPTERS_DIR / names[0], adapter_name=names[0])
    for name in names[1:]:
        peft_model.load_adapter(ADAPTERS_DIR / name, adapter_name=name)
    peft_model.eval()

    def run(requests: list[Request]) -> None:
        for name, tokens in requests:
            peft_model.set_adapter(name)
            prompt = torch.tensor([tokens])
            with torch.inference_mode():
                output = peft_model.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    min_new_tokens=NUM_TOKENS,
                    max_new_tokens=NUM_TOKENS,
                )
            assert output.shape[1] == len(tokens) + NUM_TOKENS

    return run


def _seconds(run: Callable[[list[Request]], None], requests: list[Request]) -> float:
    started = time.perf_counter()
    run(requests)
    return time.perf_counter() - started


def _result(ours: list[float], peft: list[float]) -> dict[str, Any]:
    num_tokens = NUM_STREAMS * NUM_TOKENS
    rates = {
        "lorafleet": num_tokens / statistics.median(ours),
        "peft": num_tokens / statistics.median(peft),
    }
    return {
        "tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "ratio": round(rates["lorafleet"] / rates["peft"], 2),
        "round_seconds": {"lorafleet": [round(s, 2) for s in ours], "peft": [round(s, 2) for s in peft]},
        "conditions": {
            "model": "SmolLM2-135M-Instruct, float32",
            "streams": NUM_STREAMS,
            "output_tokens": NUM_TOKENS,
            "torch_threads": torch.get_num_threads(),
            **machine(),
            "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        },
    }


if __name__ == "__main__":
    sys.exit(main())
