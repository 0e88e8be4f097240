"""Small tokenizers of every common kind, and small models with their vocabularies."""

import json
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer as RawTokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab.vocabulary import Vocabulary

SENTENCES = [
    "Once upon a time there was a little girl who lived by the sea, and she was happy.",
    "The cat sat on the mat; the dog did not.",
    "def f(x):\n\treturn x + 1\n\n",
    "雪が降る。北京是中国的首都。",
    "🙂🎉 hello world 🙂",
] * 3


def byte_level() -> Any:
    """Byte-level BPE, as GPT-2 and most later models. Characters of three and more bytes are split."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(SENTENCES, trainer)
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def metaspace() -> Any:
    """Unigram with metaspace, as T5 and ALBERT, and an unknown token."""
    raw = RawTokenizer(models.Unigram())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<unk>", "<begin>", "<end>"],
        unk_token="<unk>",
        show_progress=False,
    )
    raw.train_from_iterator(SENTENCES, trainer)
    raw.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<begin>", eos_token="<end>", unk_token="<unk>")


def byte_fallback() -> Any:
    """BPE over characters with byte fallback, as Llama 2, and a space before every text."""
    raw = RawTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    special = ["<unk>", "<s>", "</s>"]
    initial_tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    raw.train_from_iterator(
        SENTENCES[:2], trainers.BpeTrainer(vocab_size=340, special_tokens=initial_tokens, show_progress=False)
    )
    state = json.loads(raw.to_str())
    state["added_tokens"] = state["added_tokens"][: len(special)]  # byte tokens are not special
    state["pre_tokenizer"] = None  # words are split during training only
    raw = RawTokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def whole_words() -> Any:
    """Whole words of the training text; everything else, and all white space, is unknown."""
    raw = RawTokenizer(models.WordLevel(unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.train_from_iterator(
        SENTENCES, trainers.WordLevelTrainer(special_tokens=["[UNK]", "[END]"], show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", eos_token="[END]")


def characters() -> Any:
    """One token per character, and an unknown token."""
    letters = sorted(set("".join(SENTENCES[:4])))
    raw = RawTokenizer(models.WordLevel({"?": 0} | {c: i for i, c in enumerate(letters, 1)}, unk_token="?"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="?")


MAKERS = {make.__name__: make for make in (byte_level, metaspace, byte_fallback, whole_words, characters)}
PADDING = 3  # ids of a model beyond its tokenizer's, as many have


@cache
def sample_tokenizer(name: str) -> Any:
    return MAKERS[name]()


@cache
def vocabulary(name: str) -> Vocabulary:
    return Vocabulary(Tokenizer(sample_tokenizer(name)), len(sample_tokenizer(name)) + PADDING)


@cache
def llama(name: str, seed: int = 0, context: int = 256) -> Any:
    """A model with random weights and this vocabulary."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **shape, vocab_size=len(sample_tokenizer(name)) + PADDING, max_position_embeddings=context, pad_token_id=0
    )
    return LlamaForCausalLM(config).float().eval()
