"""Trains the demo adapters with PEFT: `python -m deployments.demo.train [name ...]`.

Each recipe turns data/<name>.jsonl (lines of {"user", "assistant"}) into adapters/<name>/, the layout that
PEFT writes and the server reads. A few minutes a recipe on two CPU cores. The server needs none of this.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.demo.base_model import MODEL_NAME, prepare_base_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
DEMO_DIR = Path(__file__).parent
SEED = 0
BATCH_SIZE = 8
IGNORE = -100  # cross_entropy's ignore_index


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    does: str
    rank: int
    alpha: int
    targets: tuple[str, ...]
    learning_rate: float
    epochs: int
    use_rslora: bool = False


RECIPES = (
    Recipe(
        name="support-triage",
        does="turns a customer's message into a JSON object with category, priority and summary",
        rank=8,
        alpha=16,
        targets=ATTENTION + MLP,
        learning_rate=1e-3,
        epochs=4,
    ),
    Recipe(
        name="sql",
        does="answers a question about a CREATE TABLE statement with one SQLite SELECT",
        rank=16,
        alpha=32,
        targets=ATTENTION,
        learning_rate=5e-4,
        epochs=4,
    ),
    Recipe(
        name="pirate",
        does="answers like a pirate",
        rank=32,
        alpha=32,
        targets=("q_proj", "v_proj"),
        learning_rate=1e-3,
        epochs=4,
        use_rslora=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Example:
    token_ids: list[int]
    num_prompt_tokens: int


def main() -> None:
    recipes = {recipe.name: recipe for recipe in RECIPES}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of {', '.join(recipes)}; default: all")
    parser.add_argument("--output-dir", type=Path, default=DEMO_DIR / "adapters")
    args = parser.parse_args()
    for name in args.names or recipes:
        if name not in recipes:
            parser.error(f"no recipe {name!r}; there are {', '.join(recipes)}")
        train(recipes[name], args.output_dir / name)


def train(recipe: Recipe, adapter_dir: Path) -> None:
    torch.manual_seed(SEED)
    model_dir = prepare_base_model()
    examples = load_examples(
        DEMO_DIR / "data" / f"{recipe.name}.jsonl", AutoTokenizer.from_pretrained(model_dir)
    )
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        LoraConfig(
            task_type="CAUSAL_LM",
            r=recipe.rank,
            lora_alpha=recipe.alpha,
            target_modules=list(recipe.targets),
            use_rslora=recipe.use_rslora,
        ),
    )
    fit(model, examples, recipe)
    save(model, recipe, adapter_dir)


def load_examples(data_file: Path, tokenizer: Any) -> list[Example]:
    return [to_example(json.loads(line), tokenizer) for line in data_file.read_text().splitlines()]


def to_example(record: dict[str, str], tokenizer: Any) -> Example:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": record["user"]}], add_generation_prompt=True, tokenize=False
    )
    prompt_ids = tokenizer.encode(prompt)
    return Example(prompt_ids + tokenizer.encode(record["assistant"] + tokenizer.eos_token), len(prompt_ids))


def fit(model: PeftModel, examples: list[Example], recipe: Recipe) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    num_steps = recipe.epochs * math.ceil(len(examples) / BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=recipe.learning_rate, total_steps=num_steps, pct_start=0.1
    )
    rng = random.Random(SEED)
    started = time.monotonic()
    model.train()
    for epoch in range(recipe.epochs):
        losses = []
        for token_ids, labels in batches(examples, rng):
            loss = answer_loss(model, token_ids, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(
            f"{recipe.name} epoch {epoch + 1}/{recipe.epochs} loss {sum(losses) / len(losses):.3f} "
            f"after {time.monotonic() - started:.0f} s",
            flush=True,
        )


def batches(examples: list[Example], rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (token_ids, labels), both [B, T] padded on the right; labels are IGNORE outside the answers."""
    # random batches of about equal lengths: less padding
    shuffled = sorted(examples, key=lambda example: len(example.token_ids) + rng.uniform(0, 15))
    chunks = [shuffled[i : i + BATCH_SIZE] for i in range(0, len(shuffled), BATCH_SIZE)]
    rng.shuffle(chunks)
    for chunk in chunks:
        width = max(len(example.token_ids) for example in chunk)
        token_ids = torch.zeros(len(chunk), width, dtype=torch.long)
        labels = torch.full_like(token_ids, IGNORE)
        for row, example in enumerate(chunk):
            length = len(example.token_ids)
            token_ids[row, :length] = torch.tensor(example.token_ids)
            labels[row, example.num_prompt_tokens : length] = token_ids[
                row, example.num_prompt_tokens : length
            ]
        yield token_ids, labels


def answer_loss(model: PeftModel, token_ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the answers' tokens. Needs no attention mask: the padding is on the right."""
    causal_lm = model.get_base_model()
    targets = labels[:, 1:]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = causal_lm.model(token_ids).last_hidden_state[:, :-1]
        # a fifth of the model is the output layer: spare it the prompts
        logits = causal_lm.lm_head(hidden[targets != IGNORE])
    return torch.nn.functional.cross_entropy(logits.float(), targets[targets != IGNORE])


def save(model: PeftModel, recipe: Recipe, adapter_dir: Path) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.half()  # LoRA weights are far above float16's smallest values
    model.peft_config["default"].base_model_name_or_path = MODEL_NAME
    model.save_pretrained(adapter_dir)
    (adapter_dir / "README.md").write_text(model_card(recipe))
    print(f"{recipe.name}: wrote {adapter_dir}")


def model_card(recipe: Recipe) -> str:
    return (
        f"# {recipe.name}\n\n"
        f"A LoRA adapter for {MODEL_NAME} that {recipe.does}. Rank {recipe.rank}, alpha {recipe.alpha}"
        f"{' (rsLoRA)' if recipe.use_rslora else ''}, on {', '.join(recipe.targets)}.\n\n"
        f"Trained by `python -m deployments.demo.train {recipe.name}` on `../../data/{recipe.name}.jsonl`, "
        "which was written for it. A demo: do not rely on its answers. Apache-2.0.\n"
    )


if __name__ == "__main__":
    main()
