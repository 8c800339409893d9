"""transformers + PEFT as the judge of our tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from engine.request import RequestOutput


class Contract(NamedTuple):
    """FR-45: how far we may be from the reference, in log-probability."""

    tie: float  # a token may differ only where the reference's best two are this close
    largest: float  # error of a chosen token's log-probability
    mean: float


CONTRACTS = {"float32": Contract(1e-3, 1e-4, 1e-4), "bfloat16": Contract(0.1, 0.05, 0.01)}


class Errors(NamedTuple):
    """Of each generated token, [tokens]."""

    gaps: torch.Tensor  # how far it is below the reference's best one
    logprobs: torch.Tensor  # distance between our log-probability of it and the reference's


class PeftReference:
    def __init__(self, base: Path, adapters: Mapping[str, Path], dtype: torch.dtype = torch.float32) -> None:
        """In float32 it is the judge; in another dtype it shows what that dtype costs."""
        self._base = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self._peft: PeftModel | None = None
        for name, path in adapters.items():
            if self._peft is None:
                self._peft = PeftModel.from_pretrained(self._base, path, adapter_name=name)
            else:
                self._peft.load_adapter(path, adapter_name=name)
        (self._peft or self._base).to(dtype).eval()

    def logprobs(self, token_ids: list[int], adapter: str | None) -> torch.Tensor:
        """[tokens, vocabulary]"""
        with torch.inference_mode():
            if adapter is None:
                if self._peft is None:
                    logits = self._base(torch.tensor([token_ids])).logits
                else:
                    with self._peft.disable_adapter():
                        logits = self._peft(torch.tensor([token_ids])).logits
            else:
                assert self._peft is not None
                self._peft.set_adapter(adapter)
                logits = self._peft(torch.tensor([token_ids])).logits
        return torch.log_softmax(logits[0].float(), dim=-1)

    def forced(self, prompt: list[int], token_ids: Sequence[int], adapter: str | None) -> torch.Tensor:
        """[tokens, vocabulary] of the generated `token_ids`, each given all before it."""
        return self.logprobs([*prompt, *token_ids], adapter)[len(prompt) - 1 : -1]

    def errors(self, prompt: list[int], output: RequestOutput, adapter: str | None) -> Errors:
        """Teacher-forced on our own tokens; the output has log-probabilities."""
        logprobs = self.forced(prompt, output.token_ids, adapter)
        theirs = chosen(logprobs, output)
        assert output.logprobs is not None
        ours = torch.tensor([entry.logprob for entry in output.logprobs])
        return Errors(logprobs.max(dim=-1).values - theirs, (ours - theirs).abs())

    def check_greedy(
        self, prompt: list[int], output: RequestOutput, adapter: str | None, dtype: str = "float32"
    ) -> None:
        """Each token must be the reference's choice given all before it. `dtype`: the engine's."""
        contract = CONTRACTS[dtype]
        errors = self.errors(prompt, output, adapter)
        gap, largest = float(errors.gaps.max()), float(errors.logprobs.max())
        mean = float(errors.logprobs.mean())
        assert gap <= contract.tie, f"{adapter}: a token is {gap:.2g} below the best one"
        assert largest <= contract.largest, f"{adapter}: a log-probability is off by {largest:.2g}"
        assert mean <= contract.mean, f"{adapter}: log-probabilities are off by {mean:.2g} on average"


def chosen(logprobs: torch.Tensor, output: RequestOutput) -> torch.Tensor:
    """[tokens, vocabulary] -> [tokens]: those of the output's tokens."""
    return logprobs[torch.arange(len(output.token_ids)), torch.tensor(output.token_ids)]
