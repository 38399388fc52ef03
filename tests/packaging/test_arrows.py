"""Which folder of csrc may include which. Includes go one way, so that a layer can be read without those above it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
pytestmark = pytest.mark.quick

# From the bottom to the top: a folder may include itself and those before it.
LAYERS = (
    "util",
    "cuda",
    "health",
    "shm",
    "jit",
    "dma",
    "collectives",
    "compiler/graph",
    "compiler/fuse",
    "compiler/schedule",
    "compiler/verify",
    "compiler/passes",
    "compiler/emit",
    "compiler/runtime",
    "compiler/inspect",
    "process_group",
    "compiler/region",
    "ops",
    "bindings",
)
KNOW_TORCH = ("process_group", "compiler/region", "ops", "bindings")


def layer_of(path: Path) -> str:
    parts = path.parts
    if len(parts) == 1:
        return "bindings"
    return "/".join(parts[:2]) if parts[0] == "compiler" else parts[0]


def sources() -> list[Path]:
    return sorted([*CSRC.rglob("*.cpp"), *CSRC.rglob("*.hpp")])


def includes(path: Path) -> list[str]:
    return re.findall(r'^#include ["<]([^">]+)[">]', path.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_folder_has_a_layer() -> None:
    assert {layer_of(path.relative_to(CSRC)) for path in sources()} == set(LAYERS)


def test_arrows_run_one_way() -> None:
    wrong = []
    for path in sources():
        here = layer_of(path.relative_to(CSRC))
        for name in includes(path):
            if (CSRC / name).is_file() and LAYERS.index(layer_of(Path(name))) > LAYERS.index(here):
                wrong.append(f"{path.relative_to(CSRC)} ({here}) includes {name}")
    assert not wrong, "\n".join(wrong)


def test_only_the_top_knows_torch() -> None:
    wrong = [
        f"{path.relative_to(CSRC)} includes {name}"
        for path in sources()
        for name in includes(path)
        if name.startswith(("torch/", "ATen/", "c10/", "pybind11/"))
        and layer_of(path.relative_to(CSRC)) not in (("bindings",) if name.startswith("pybind11/") else KNOW_TORCH)
    ]
    assert not wrong, "\n".join(wrong)
