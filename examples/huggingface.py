"""Hugging Face models on ark's kernels: generate(), a plain decoding loop, and a pipeline. Prints tokens a second.

    python examples/huggingface.py                        # random weights; nothing is downloaded
    python examples/huggingface.py --model Qwen/Qwen2.5-0.5B --dtype bfloat16 --beside inductor
    python examples/huggingface.py --device cuda --dtype bfloat16 --size large --beside inductor

- generate: `cache_implementation="static"` and `CompileConfig(backend="ark")`; generate() compiles its own steps.
- plain: the model's compiled forward pass and a StaticCache, which is what generate() does inside.
- pipeline: does not compile; its model's forward pass does. Texts are padded to one length, since each is a shape.

Exit code: 0, or 1 if a compiled model writes other tokens than the eager one (in float32; 16-bit types may differ).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent))

from inference.compared import Compile, arguments, compare

WORDS = [
    "the",
    "a",
    "film",
    "plot",
    "actor",
    "scene",
    "is",
    "was",
    "very",
    "not",
    "good",
    "bad",
    "fine",
    "long",
    "dull",
]


# Hidden and inner size, layers, heads, heads of keys and values, vocabulary: large is Llama 3.2 1B, or BERT-Large.
LLAMAS = {
    "tiny": (64, 160, 2, 4, 2, 128),
    "small": (512, 1408, 8, 8, 4, 8192),
    "large": (2048, 8192, 16, 32, 8, 128256),
}
BERTS = {"tiny": (64, 128, 2, 4), "small": (256, 1024, 4, 4), "large": (1024, 4096, 24, 16)}
COMPILED = ("_compiled_call", "_last_compile_config")
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def language_model(options: argparse.Namespace) -> Any:
    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
        return model.to(options.device, getattr(torch, options.dtype)).eval()
    *sizes, few, words = LLAMAS[options.size]
    config = transformers.LlamaConfig(
        vocab_size=words, num_key_value_heads=few, max_position_embeddings=256, **dict(zip(SIZES, sizes, strict=True))
    )
    config.pad_token_id = config.eos_token_id = 0
    with torch.device(options.device):
        return transformers.LlamaForCausalLM(config).to(getattr(torch, options.dtype)).eval()


def generating(model: Any, options: argparse.Namespace) -> Callable[[Compile | None], Callable[[], tuple[Any, int]]]:
    ids = torch.randint(1, min(model.config.vocab_size, 100), (1, 8), device=options.device)
    settings = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens, "do_sample": False}

    def work(compiler: Compile | None) -> Callable[[], tuple[Any, int]]:
        chosen: dict[str, Any] = {"disable_compile": True}
        if compiler is not None:
            config = transformers.CompileConfig(
                backend=compiler.backend, options=compiler.options, fullgraph=False, dynamic=False, mode=compiler.mode
            )
            config._compile_all_devices = True  # otherwise generate() compiles on GPUs only
            chosen = {"compile_config": config}

        own: dict[str, Any] = {}  # what generate() compiled: it keeps that in the model, which others use, too

        def run() -> tuple[Any, int]:
            for name in COMPILED:
                model.__dict__.pop(name, None)
            model.__dict__.update(own)
            tokens = model.generate(ids, cache_implementation="static", **settings, **chosen)
            own.update({name: model.__dict__[name] for name in COMPILED if name in model.__dict__})
            return tokens, options.tokens

        return run

    return work


def decoding(model: Any, options: argparse.Namespace) -> Callable[[Compile | None], Callable[[], tuple[Any, int]]]:
    config, first = model.config, 1
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    length = options.tokens + 8
    dtype = getattr(torch, options.dtype)

    def work(compiler: Compile | None) -> Callable[[], tuple[Any, int]]:
        step = model.forward if compiler is None else compiler(model.forward)
        cache = transformers.StaticCache(config=config, max_cache_len=length)
        cache.early_initialization(1, config.num_key_value_heads, head, dtype, options.device)

        @torch.no_grad()
        def run() -> tuple[Any, int]:
            cache.reset()
            token, chosen = torch.full((1, 1), first, device=options.device), []
            for _ in range(options.tokens):
                token = step(input_ids=token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
                chosen.append(token)
            return torch.cat(chosen, 1), options.tokens

        return run

    return work


def classifying(options: argparse.Namespace) -> Callable[[Compile | None], Callable[[], tuple[Any, int]]]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]")
    sizes = dict(zip(SIZES, BERTS[options.size], strict=True))
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=64, **sizes)
    model = transformers.BertForSequenceClassification(config).to(options.device, getattr(torch, options.dtype)).eval()
    texts = [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(3 + i % 12)) for i in range(16)]
    plain = model.forward

    def work(compiler: Compile | None) -> Callable[[], tuple[Any, int]]:
        forward = plain if compiler is None else compiler(plain)
        classify = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, device=options.device)
        padded = {"padding": "max_length", "max_length": 16, "truncation": True}

        def run() -> tuple[Any, int]:
            model.forward = forward
            return torch.tensor([one["score"] for one in classify(texts, batch_size=8, **padded)]), len(texts) * 16

        return run

    return work


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", help="a name on the hub or a folder; default: a tiny one with random weights")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens in each run")
    parser.add_argument("--only", choices=("generate", "plain", "pipeline"))
    options = parser.parse_args()
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    exact = options.dtype == "float32"
    right = True

    def equal(expected: Any, result: Any) -> bool:
        return not exact or torch.equal(expected, result)

    def close(expected: Any, result: Any) -> bool:
        return torch.allclose(expected, result, rtol=1e-4 if exact else 2e-2, atol=1e-5 if exact else 2e-2)

    if options.only in (None, "generate", "plain"):
        model = language_model(options)
        if options.only != "plain":
            right &= compare("generate(), static cache", "tokens/s", generating(model, options), options, equal)
        if options.only != "generate":
            right &= compare("plain loop, static cache", "tokens/s", decoding(model, options), options, equal)
    if options.only in (None, "pipeline"):
        right &= compare("pipeline, padded texts", "tokens/s", classifying(options), options, close)
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
