"""llama.cpp's server on the models of a pair, to be measured beside ours, and as an engine that DSI speaks to.

It comes from the wheel `xllamacpp`; where that is not installed, in an environment of its own that is made at the first
use, under `$XDG_CACHE_HOME/dsi`. Models in folders are written as GGUF there. This file also runs inside that
environment: `llama_cpp.py convert FOLDER ARRAYS FILE DTYPE` and `llama_cpp.py serve MODEL DRAFT THREADS GUESSES SLOTS`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = ("xllamacpp", "gguf", "numpy")
CONTEXT = 2048
NGRAM, MATCHED = "ngram", 3  # its prompt lookup, by so many matching tokens


def folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dsi" / "llama.cpp"


def python() -> str:
    """This interpreter, if it has the packages, or that of the environment, which is made if it is not there."""
    if all(map(find_spec, PACKAGES)):
        return sys.executable
    path = folder() / "venv"
    program = path / "bin" / "python"
    if not (path / "installed").exists():
        venv.create(path, with_pip=True, clear=True)
        subprocess.run([program, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        (path / "installed").touch()
    return str(program)


def gguf(model: str, dtype: str) -> str:
    """A model in a folder as a GGUF file, written once for its number format."""
    if model.endswith(".gguf"):
        return model
    weights = max(path.stat().st_mtime_ns for path in Path(model).glob("*.safetensors"))
    path = folder() / f"{Path(model).parent.name}-{Path(model).name}-{dtype}-{weights:x}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        with tempfile.NamedTemporaryFile(suffix=".npz") as arrays:
            save_weights(model, arrays.name)
            subprocess.run([python(), __file__, "convert", model, arrays.name, unfinished, dtype], check=True)
        unfinished.rename(path)
    return str(path)


def save_weights(model: str, path: str) -> None:
    """Write the weights as numpy's arrays, in float32; a tied head is left out."""
    import numpy
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    weights = {name: tensor.numpy() for name, tensor in loaded.state_dict().items()}
    if loaded.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    numpy.savez(path, **weights)


class LlamaCpp(AbstractContextManager["LlamaCpp"]):
    """A server of llama.cpp in a process of its own, which answers `slots` requests at once.

    With a draft model or `ngram` it speculates, `guesses` tokens at most.
    """

    def __init__(self, target: str, eos: int, threads: int, draft: str = "", guesses: int = 0, slots: int = 1) -> None:
        self.eos = eos  # which some versions leave out
        command = [python(), __file__, "serve", target, draft, *map(str, (threads, guesses, slots))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        line = self._process.stdout.readline() if self._process.stdout else b""
        if not line:
            raise SystemExit(f"llama.cpp does not start: {' '.join(command)}")
        self.url = line.decode().strip()

    def generate(self, prompt: tuple[int, ...], tokens: int) -> tuple[tuple[int, ...], float, float]:
        """Return the tokens, the seconds that the server took for prompt and text, and those for the prompt."""
        answer = self._complete(prompt, tokens, cache_prompt=False)
        timings = answer["timings"]
        prefill = timings["prompt_ms"] / 1000
        ends = answer["stop_type"] == "eos" and answer["tokens"][-1:] != [self.eos]
        return (*answer["tokens"], *[self.eos] * ends)[:tokens], prefill + timings["predicted_ms"] / 1000, prefill

    def _complete(self, prompt: Sequence[int], tokens: int, cache_prompt: bool) -> Any:
        body = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "cache_prompt": cache_prompt}
        body |= {"return_tokens": True, "samplers": ["temperature"], "ignore_eos": cache_prompt}
        request = urllib.request.Request(
            f"{self.url}/completion", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)

    def forward_ms(self, prefix: Sequence[int], tokens: Sequence[int]) -> float:
        """Time a forward over so many tokens after a prefix: reading the end of a prompt, or generating one."""
        if len(tokens) == 1:
            timings = self._complete(prefix, 16, cache_prompt=True)["timings"]
            return float(timings["predicted_ms"] / timings["predicted_n"])
        self._complete(prefix, 1, cache_prompt=True)
        timings = self._complete([*prefix, *tokens], 1, cache_prompt=True)["timings"]
        if timings["prompt_n"] != len(tokens):
            raise SystemExit(f"llama.cpp read {timings['prompt_n']} tokens instead of {len(tokens)}")
        return float(timings["prompt_ms"])

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with self._process:  # which closes its pipes
            pass


# In the environment of its own:


def convert(model: Path, arrays: str, out: str, dtype: str) -> None:
    """Write a Llama with a byte-level tokenizer as GGUF."""
    import numpy
    from gguf import GGMLQuantizationType, quants

    config = json.loads((model / "config.json").read_text())
    writer = gguf_writer(out, "llama")
    _write_config(writer, config)
    _write_tokenizer(writer, json.loads((model / "tokenizer.json").read_text()), config)
    for name, values in numpy.load(arrays).items():
        own = _tensor_name(name)
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(own.split(".")[-2])
        weights = _rotated(values, config[heads]) if heads else values
        if dtype == "bfloat16" and weights.ndim == 2:
            bits = quants.quantize(weights, GGMLQuantizationType.BF16)
            writer.add_tensor(own, bits, raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(own, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_writer(path: str, architecture: str) -> Any:
    from gguf import GGUFWriter

    return GGUFWriter(path, architecture)


def _write_config(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    writer.add_vocab_size(config["vocab_size"])


def _write_tokenizer(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    vocabulary = {id: token for token, id in tokenizer["model"]["vocab"].items()}
    special = {token["id"] for token in tokenizer["added_tokens"]}
    names = [vocabulary.get(i, f"<unused{i}>") for i in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([3 if i in special else 1 if i in vocabulary else 5 for i in range(len(names))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(bool(tokenizer["post_processor"]))


def _tensor_name(name: str) -> str:
    for theirs, ours in (
        ("model.embed_tokens", "token_embd"),
        ("model.layers", "blk"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ):
        name = name.replace(theirs, ours)
    return name


def _rotated(weights: Any, heads: int) -> Any:
    """The rows of queries or keys in the order of llama.cpp's rotary embedding."""
    rows, columns = weights.shape
    halves = weights.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns).copy()


def serve(target: str, draft: str, threads: int, guesses: int, slots: int) -> None:
    """Serve until the standard input is closed; the address is written to standard output."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = target, CONTEXT * slots, slots, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    speculative = params.speculative
    if draft == NGRAM:
        speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        speculative.ngram_simple.size_n, speculative.ngram_simple.size_m = MATCHED, guesses
    elif draft:
        speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        speculative.draft.mparams.path, speculative.draft.n_max = draft, guesses
        speculative.draft.cpuparams.n_threads = speculative.draft.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1:2] == ["convert"]:
        convert(Path(sys.argv[2]), *sys.argv[3:6])
    else:
        serve(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:7]))
