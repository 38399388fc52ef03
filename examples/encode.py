"""Sentence embeddings, as sentence-transformers' encode() computes them: batches, mean pooling, unit length.

    python examples/encode.py --beside inductor

Sentences are sorted by length and padded to few lengths (multiples of --multiple), because every length is a shape and
each new shape is compiled once. With sentence-transformers itself, compile the inner model's forward pass (its
`encode()` stays as it is): docs/serving.md. Exit code: 0, or 1 if embeddings differ from eager PyTorch's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from inference.compared import Compile, arguments, compare


def sentences(count: int, words: int) -> list[list[int]]:
    """Token numbers, of many lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 28, (count,), generator=generator).tolist()
    return [torch.randint(1, words, (length,), generator=generator).tolist() for length in lengths]


def batches(texts: list[list[int]], size: int, multiple: int) -> list[tuple[list[int], Tensor, Tensor]]:
    """Which sentences, their padded numbers, and where these are not padding."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    made = []
    for begin in range(0, len(order), size):
        chosen = order[begin : begin + size]
        length = -(-len(texts[chosen[-1]]) // multiple) * multiple
        ids = torch.zeros(size, length, dtype=torch.int64)  # a last batch is filled up, so that it is no new shape
        for row, i in enumerate(chosen):
            ids[row, : len(texts[i])] = torch.tensor(texts[i])
        mask = (ids != 0).long()
        mask[:, 0] = 1
        made.append((chosen, ids, mask))
    return made


# Hidden and inner size, layers, heads: small is all-MiniLM-L6, large BERT-base.
SIZES = {"tiny": (64, 128, 2, 4), "small": (384, 1536, 6, 12), "large": (768, 3072, 12, 12)}


def encoding(options: argparse.Namespace) -> Callable[[Compile | None], Callable[[], tuple[Any, int]]]:
    torch.manual_seed(0)
    hidden, inner, layers, heads = SIZES[options.size]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    model = transformers.BertModel(
        transformers.BertConfig(vocab_size=200, max_position_embeddings=64, num_attention_heads=heads, **sizes)
    )
    model = model.to(options.device, getattr(torch, options.dtype)).eval()
    texts = sentences(options.sentences, 200)
    made = [
        (chosen, ids.to(options.device), mask.to(options.device))
        for chosen, ids, mask in batches(texts, 16, options.multiple)
    ]

    def embed(ids: Tensor, mask: Tensor) -> Tensor:
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1)
        return torch.nn.functional.normalize(mean, dim=1)

    def work(compiler: Compile | None) -> Callable[[], tuple[Any, int]]:
        compiled = embed if compiler is None else compiler(embed)

        @torch.no_grad()
        def run() -> tuple[Any, int]:
            found = torch.empty(len(texts), sizes["hidden_size"])
            for chosen, ids, mask in made:
                found[chosen] = compiled(ids, mask)[: len(chosen)].float().cpu()
            return found, len(texts)

        return run

    return work


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--sentences", type=int, default=60)
    parser.add_argument("--multiple", type=int, default=16, help="lengths are padded to multiples of this")
    options = parser.parse_args()
    close = 1e-5 if options.dtype == "float32" else 2e-2

    def same(expected: Any, result: Any) -> bool:
        return torch.allclose(expected, result, rtol=0, atol=close)

    return 0 if compare("sentence embeddings", "sentences/s", encoding(options), options, same) else 1


if __name__ == "__main__":
    raise SystemExit(main())
