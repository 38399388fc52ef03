"""Row and pointwise programs of many rows for GPUs, without a GPU: every width compiles, and no register spills.

tests/gpu/test_compile_rows.py tests what they compute.
"""

from __future__ import annotations

from typing import Any

import pytest
import row_programs
import torch
from cuda_sources import Sources, needs_nvrtc

pytestmark = [needs_nvrtc, pytest.mark.timeout(200)]


@pytest.mark.by_day("sm_90a-bfloat16-2048")
@pytest.mark.parametrize("columns", [512, 768, 1000, 1600, 2048, 4096, 12288])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda dtype: str(dtype)[6:])
def test_many_rows(sources: Sources, compiled: Any, dtype: torch.dtype, columns: int) -> None:
    given = row_programs.inputs(1100, columns, dtype)
    compiled(row_programs.programs, dynamic=False, minimum=1, fallback=False)[0](*given)
    [source] = sources.found
    widest = 4 if dtype == torch.float32 else 8
    assert source.count(f", {widest}> k") >= 10, "pieces"
    sources.check()
