"""transformers + PEFT as the judge of our tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from engine.request import RequestOutput

NEAR_TIE = 1e-3  # a token may differ only where the reference's best two are this close
LOGPROB_TOLERANCE = 1e-4  # fp32


class PeftReference:
    def __init__(self, base: Path, adapters: Mapping[str, Path]) -> None:
        self._base = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self._peft: PeftModel | None = None
        for name, path in adapters.items():
            if self._peft is None:
                self._peft = PeftModel.from_pretrained(self._base, path, adapter_name=name)
            else:
                self._peft.load_adapter(path, adapter_name=name)
        self._base.eval()

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

    def check_greedy(self, prompt: list[int], output: RequestOutput, adapter: str | None) -> None:
        """Teacher-forced on our own tokens: each must be the reference's choice given all before it."""
        token_ids = list(output.token_ids)
        logprobs = self.logprobs(prompt + token_ids, adapter)[len(prompt) - 1 : -1]
        best = logprobs.topk(2)
        for i, token_id in enumerate(token_ids):
            if token_id != best.indices[i, 0]:
                gap = float(best.values[i, 0] - logprobs[i, token_id])
                assert gap <= NEAR_TIE, f"{adapter}: token {i} is {token_id}, {gap:.2g} below the best one"
        if output.logprobs is not None:
            ours = torch.tensor([entry.logprob for entry in output.logprobs])
            theirs = logprobs[torch.arange(len(token_ids)), torch.tensor(token_ids)]
            error = float((ours - theirs).abs().max())
            assert error <= LOGPROB_TOLERANCE, f"{adapter}: a log-probability is off by {error:.2g}"
