"""These tests run only where there is a GPU. Elsewhere they are not collected, and none skips itself.

make test-gpu SHARD=2/3 runs every third test, from the second on. Tests of messages and of failures need a second GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import native
import pytest
import torch
from on_gpu import GPUS, SHARED, WORLD
from support import crew

from ark_torch import _C

_NEED_TWO = [
    f"test_{name}.py"
    for name in (
        "between_nodes",
        "gpu_windows",
        "channels",
        "compile_ranks",
        "compile_fused",
        "copy_engines",
        "nccl_entry",
        "peers",
        "send_recv",
        "cuda_failures",
        "libraries",
        "pytorch_suite",
        "against_nccl",
        "tune_cuda",
        "registered",
        "train_ranks",
        "train_pipelines",
    )
]
# NCCL and PyTorch's symmetric memory refuse ranks that share a GPU (ARK_TEST_RANKS).
_NEED_GPUS = [
    f"test_{name}.py"
    for name in (
        "between_nodes",
        "gpu_windows",
        "channels",
        "nccl_entry",
        "peers",
        "libraries",
        "pytorch_suite",
        "against_nccl",
        "tune_cuda",
        "symmetric_memory",
        "endurance",
    )
]
_LEFT_OUT = _NEED_TWO if WORLD < 2 else _NEED_GPUS if SHARED else []
collect_ignore_glob = _LEFT_OUT if _C._has_cuda_driver() else ["test_*.py"]


def pytest_report_header() -> str:
    if not _C._has_cuda_driver():
        return "tests/gpu: no CUDA driver, none collected"
    left_out = f", so without {', '.join(_LEFT_OUT)}" if _LEFT_OUT else ""
    return f"tests/gpu: {GPUS} GPUs, {WORLD} ranks{left_out}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    if SHARED:
        items[:] = [item for item in items if here not in item.path.parents or "nccl" not in item.name]


@pytest.fixture(scope="session")
def native_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native.build(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="session")
def communicator_random(native_programs: Path) -> Path:
    return native_programs / "communicator_random"


@pytest.fixture(scope="session", autouse=True)
def _crews() -> Iterator[None]:
    yield
    crew.finish_all()


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None) -> Iterator[None]:
    yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Starts without compiled code, with exact float32 products and without gradients."""
    before = torch.backends.cuda.matmul.allow_tf32  # pytest 9.2's monkeypatch cannot restore this module's attributes
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch._dynamo.reset()
    torch.backends.cuda.matmul.allow_tf32 = before
