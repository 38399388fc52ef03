"""A GPT-fast-like decoding loop: a prompt, then one compiled step a token, with weights of few bits if asked.

    python examples/decode_loop.py --quantize int8
    python examples/decode_loop.py --device cuda --dtype bfloat16 --size large --quantize int4 --beside inductor

As in GPT-fast and torchtune, the model keeps its caches, `prefill` runs once over the prompt, and `decode_one_token`
is compiled and called with the position as a tensor, so one graph serves all of them. `--quantize` rewrites the linear
layers in plain PyTorch (examples/llama/quantized.py); `--torchao` lets torchao do it, where it is installed. Sampling
(temperature and top-k) is part of the compiled step. With `--resident` ark runs all steps from one launch
(ark_torch.resident), the others step by step. Exit code: 0; 1 if tokens differ from the eager model's (greedy,
float32); 2 if a package is missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ark_torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from inference.compared import Compile, arguments, compare
from llama.model import Llama, LlamaConfig
from llama.quantized import TORCHAO, quantize, quantize_by_torchao

CONFIGS = {
    "tiny": LlamaConfig(hidden=256, layers=2, heads=4, kv_heads=2, ffn=768, vocabulary=256, max_len=128),
    "small": LlamaConfig(hidden=1024, layers=8, heads=16, kv_heads=4, ffn=2816, vocabulary=8192, max_len=512),
    # Llama 3.2 1B's sizes
    "large": LlamaConfig(hidden=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocabulary=128256, max_len=1024),
}


def made(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[options.size]
    model: nn.Module = Llama(config).to(options.device, getattr(torch, options.dtype)).eval().requires_grad_(False)
    if options.torchao:
        try:
            quantize_by_torchao(model, options.quantize or "int8")
        except ImportError as error:
            other = ", or take --quantize int8 or float8" if options.quantize == "int4" else ""
            raise ImportError(f"{error}: leave out --torchao{other}") from error
    elif options.quantize:
        quantize(model, options.quantize)
    return model


def sampled(logits: Tensor, noise: Tensor, temperature: float, top: int) -> Tensor:
    """The most probable token, or one of the `top` most probable ones; `noise` is exponentially distributed."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    best = torch.topk(logits.float() / temperature, top)
    chosen = (torch.softmax(best.values, -1) / noise).argmax(-1, keepdim=True)
    return best.indices.gather(-1, chosen)


def loop(options: argparse.Namespace) -> Callable[[Compile | None], Callable[[], tuple[Any, int]]]:
    model = made(options)
    prompt = torch.randint(0, 256, (1, 8), device=options.device)
    places = torch.arange(prompt.shape[1] + options.tokens, device=options.device)
    noise = torch.empty(options.tokens + 1, 1, options.top_k, device=options.device)
    noise.exponential_(generator=torch.Generator(options.device).manual_seed(1))

    def decode_one_token(token: Tensor, position: Tensor, noise: Tensor) -> Tensor:
        return sampled(model(token, position), noise, options.temperature, options.top_k)

    def stateful(token: Tensor, position: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return decode_one_token(token, position, noise), position + 1

    def work(compiler: Compile | None) -> Callable[[], tuple[Any, int]]:
        step = decode_one_token if compiler is None else compiler(decode_one_token, fullgraph=True)
        at_once = None
        if options.resident and compiler is not None and compiler.backend == "ark":
            at_once = ark_torch.resident(stateful, options={**(compiler.options or {}), "fallback": False})

        @torch.no_grad()
        def run() -> tuple[Any, int]:
            length = prompt.shape[1]
            token = sampled(model(prompt, places[:length]), noise[0], options.temperature, options.top_k)
            chosen = [token]
            if at_once is not None:
                kept = at_once(token, places[length : length + 1], steps=options.tokens, inputs=(noise[1:],)).kept[0]
                return torch.cat([token, *kept], 1), options.tokens
            for i in range(options.tokens):
                # As GPT-fast does: with mode="reduce-overhead" the next step overwrites what this one returned.
                token = step(token, places[length + i : length + i + 1], noise[i + 1]).clone()
                chosen.append(token)
            return torch.cat(chosen, 1), options.tokens

        return run

    return work


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--quantize", choices=("int8", "int4", "float8", "float8-dynamic"))
    parser.add_argument("--torchao", action="store_true", help="let torchao quantize")
    parser.add_argument("--resident", action="store_true", help="ark decodes all tokens from one launch")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--top-k", type=int, default=16)
    options = parser.parse_args()
    if options.torchao and (options.quantize or "int8") not in TORCHAO:
        parser.error(f"--torchao takes --quantize {', '.join(TORCHAO)}, got {options.quantize}")
    exact = options.dtype == "float32" and options.temperature == 0
    weights = f"{options.quantize or 'int8'} by torchao" if options.torchao else options.quantize or options.dtype
    manner = f"{', sampled' if options.temperature else ''}{', resident by ark' if options.resident else ''}"

    def same(expected: Any, result: Any) -> bool:
        if exact and options.quantize != "float8-dynamic":  # which rounds rows, so a last bit may change a code
            return torch.equal(expected, result)
        return bool(((result >= 0) & (result < CONFIGS[options.size].vocabulary)).all())

    try:
        work = loop(options)
    except ImportError as error:
        parser.error(str(error))
    return 0 if compare(f"decoding, {weights}{manner}", "tokens/s", work, options, same) else 1


if __name__ == "__main__":
    raise SystemExit(main())
