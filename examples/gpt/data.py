"""The demo's text: the source of the Python standard library that runs it, as bytes.

It exists on every machine that can run the demo, so nothing is downloaded. A hash of its path assigns each file to the
training or the held-out text, so that a held-out file is never seen in training, and the split is the same on all
ranks. The set of files depends on Python version and distribution, so losses compare only within one installation.
"""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Not the library's own source, or not typical code: tests, and tables of characters.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}
HELD_OUT_ONE_IN = 12


@dataclass(frozen=True)
class Corpus:
    train: Tensor
    held_out: Tensor
    train_files: int
    held_out_files: int


def load_corpus(folder: Path | None = None) -> Corpus:
    """Reads the *.py files under `folder` (default: the standard library), in the same order on all ranks."""
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    if not root.is_dir():
        raise ValueError(f"text folder {root} does not exist or is no folder; name one that holds *.py files")
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(name.parts):
            continue
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if content:
            parts[zlib.crc32(name.as_posix().encode()) % HELD_OUT_ONE_IN == 0].append(content)
    if not parts[False] or not parts[True]:
        counts = f"{len(parts[False])} training and {len(parts[True])} held-out"
        raise ValueError(f"{root} holds too few *.py files ({counts}); name a folder with a few dozen")
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(parts[key])), dtype=torch.uint8) for key in (False, True))
    return Corpus(train, held_out, len(parts[False]), len(parts[True]))


def check_length(text: Tensor, context: int, what: str) -> None:
    if text.numel() <= context + 1:
        raise ValueError(f"the {what} text has {text.numel()} bytes, too few for a context of {context}")


def sample_windows(text: Tensor, batch: int, context: int, generator: torch.Generator) -> Tensor:
    """Returns a batch of random windows of context + 1 bytes: inputs and, shifted by one, targets."""
    starts = torch.randint(text.numel() - context - 1, (batch, 1), generator=generator)
    return text[starts + torch.arange(context + 1)].long()


def fixed_windows(text: Tensor, count: int, context: int) -> Tensor:
    """Returns `count` windows spread evenly over the text, the same at every evaluation and in every run."""
    starts = torch.linspace(0, text.numel() - context - 1, count).long()[:, None]
    return text[starts + torch.arange(context + 1)].long()
