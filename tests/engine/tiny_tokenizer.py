"""Small real tokenizers, trained on a few lines: text beyond them falls apart into bytes."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from engine.tokenizer import Tokenizer

LINES = (
    "The quick brown fox jumps over the lazy dog.",
    "Observation: the result is 42.\nThought: I should stop here, the answer is there.",
    "naïve café, Größe, señor 😀😀",
    "漢字とかな 中文字符 한국어",
)
SPECIAL_TOKENS = ("<|begin|>", "<|end|>")


def wrap(fast: FastTokenizer) -> Tokenizer:
    begin, end = SPECIAL_TOKENS
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, bos_token=begin, eos_token=end))


def byte_level_tokenizer() -> Tokenizer:
    """As Llama 3, Qwen and SmolLM have it."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(LINES, trainer)
    fast.add_tokens([AddedToken("<tool call>", special=False)])
    return wrap(fast)


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2 and Mistral have it: `▁` for a space, `<0xNN>` for the bytes of unknown characters."""
    letters = sorted(set("".join(LINES).replace(" ", "▁")) - set("😀漢字\n"))
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["he", "▁t", "▁the"]
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *byte_tokens, *letters, *words))}
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he")]
    fast = FastTokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast.add_special_tokens(list(SPECIAL_TOKENS))
    return wrap(fast)
