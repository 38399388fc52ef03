"""Compiled regions for processors with fewer instructions than this one give eager's numbers.

They have 8 lanes (AVX, AVX2), or vectors wider than registers (SSE).
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import start
from torch import Tensor

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64"),
]

WITHOUT = {
    "avx2": "-mno-avx512f",
    "avx": "-mno-avx512f -mno-avx2 -mno-fma",
    "sse": "-mno-avx512f -mno-avx",
}


def compiler(folder: Path, name: str) -> str:
    """Adds flags after -march=native. Flags in CXX itself would come before it."""
    folder.mkdir()
    script = folder / "g++"
    script.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" {WITHOUT[name]}\n')
    script.chmod(0o755)
    return str(script)


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """Decodes 4 bits in groups of 32."""
    whole = torch.stack((codes & 15, codes >> 4), -1).view(codes.shape[0], -1, 32)
    return ((whole.float() - 8) * scales[:, :, None]).flatten(1)


def everything(x: Tensor, y: Tensor, n: Tensor, half: Tensor, q: Tensor, *coded: Tensor) -> list[Tensor]:
    """Sizes that are no multiple of any vector, every element type, sums, products, attention and selection."""
    mask = x > 0.25
    signed, small, codes = coded
    return [
        torch.softmax(x, -1),
        F.layer_norm(x, (x.shape[1],)),
        x.sum(0) + x.amax(0) - x.amin(0),
        x.argmax(-1),
        x.var(-1),
        x.cumsum(-1),
        F.gelu(x) + x.sin() * x.exp() + torch.where(mask, x, -x).abs().sqrt(),
        mask.any(-1),
        mask.clone(),
        (n * 3 + 1) // 7 + n.sum(-1, keepdim=True),
        n.to(torch.int32) * 5 - 2,
        F.linear(x, y),
        x.t() @ x,
        F.linear(half, half[:5]),
        half.float().bfloat16().to(half.dtype),
        half * 2 + 1,
        F.scaled_dot_product_attention(q, q, q),  # many rows: keys are transposed
        F.scaled_dot_product_attention(q[:, :, :1], q, q, attn_mask=q[:, :1, :1, 0:1] < 9),
        x[:, ::3].contiguous(),
        torch.topk(x, 3)[1],
        *(F.linear(x[:rows], signed.float()) for rows in (1, 13)),
        *(F.linear(x[:rows], small.float()) for rows in (1, 13)),
        *(F.linear(y[:rows, :32].repeat(1, 2), decoded(codes, x[:9, :2])) for rows in (1, 13)),
    ]


def main() -> None:
    """Runs in a separate process, because a process determines its compiler only once."""
    torch.manual_seed(0)
    given = (
        torch.randn(13, 37),
        torch.randn(21, 37),
        torch.randint(-9, 9, (7, 19)),
        torch.randn(11, 23).to(torch.float16),
        torch.randn(1, 2, 27, 20),
        torch.randint(-128, 128, (9, 37), dtype=torch.int8),
        torch.randn(9, 37).to(torch.float8_e4m3fn),
        torch.randint(0, 256, (9, 32), dtype=torch.uint8),
    )
    options = {"choose": "ark", "fallback": False, "minimum": 1}
    call = torch.compile(everything, backend="ark", options=options)
    with torch.no_grad():
        got, right = call(*given), everything(*given)
        for number, (one, other) in enumerate(zip(got, right, strict=True)):
            near = {"rtol": 4e-3, "atol": 4e-3} if other.dtype == torch.float16 else {"rtol": 2e-5, "atol": 2e-5}
            torch.testing.assert_close(one, other, **near, msg=lambda text, i=number: f"result {i}: {text}")
        assert all(torch.equal(one, other) for one, other in zip(got, call(*given), strict=True))


@pytest.mark.by_day("avx2")
@pytest.mark.changed("ark_torch/kernels/cpu/*", "csrc/compiler/emit/cpu/*", "csrc/jit/*")
@pytest.mark.parametrize("name", WITHOUT)
def test_eagers_numbers(name: str, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++: the test is about its vectors")
    more = {"CXX": compiler(tmp_path / "compiler", name), "ARK_CACHE": str(tmp_path / "cache"), "ARK_COSTS": "assumed"}
    more["ARK_OPTIMISE"] = "1"
    done = subprocess.run(
        [sys.executable, __file__],
        env={**start.base_environment(), **more},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    main()
