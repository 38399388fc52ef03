"""What ark_torch.export() adds to PyTorch's file of a compiled program: who wrote it, and a checksum.

Both stand behind what PyTorch wrote, which its own loader reads without them. PyTorch unpickles before it compares
versions, and compiled code that lost a bit would run: load() compares both first. A file that PyTorch's own interface
wrote has no such end, and is loaded unchecked.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from ark_torch.compile import saved
from ark_torch.errors import CompileError

_END = b"ark_torch program\n"  # behind the length of the JSON
_LENGTH = 8  # bytes


def seal(path: Path) -> None:
    """Adds the end to a file that PyTorch wrote."""
    program = path.read_bytes()
    about = {"version": saved.version(), "sha256": hashlib.sha256(program).hexdigest()}
    text = json.dumps(about).encode()
    with path.open("ab") as file:
        file.write(text + len(text).to_bytes(_LENGTH, "little") + _END)


def opened(path: str | os.PathLike[str]) -> tuple[bytes, bool]:
    """PyTorch's part of the file, and whether that is known to be whole. Raises CompileError if it is not, or if other
    versions wrote it."""
    content = Path(path).read_bytes()
    if not content.startswith(b"\x80"):  # a pickle
        raise unreadable(path)
    if not content.endswith(_END):
        return content, False
    head = len(content) - len(_END) - _LENGTH
    begin = head - int.from_bytes(content[max(head, 0) : head + _LENGTH], "little")
    try:
        about = json.loads(content[begin:head]) if 0 < begin <= head else {}
        version, checksum = about["version"], about["sha256"]
    except (ValueError, KeyError, TypeError):
        raise unreadable(path) from None
    if hashlib.sha256(content[:begin]).hexdigest() != checksum:
        raise unreadable(path)
    if version != saved.version():
        raise CompileError(
            f"load: {os.fspath(path)} was exported by ark_torch {version}, and this is {saved.version()}: export it "
            "again"
        )
    return content[:begin], True


def unreadable(path: str | os.PathLike[str]) -> CompileError:
    return CompileError(
        f"load: {os.fspath(path)} is damaged, or was not written by ark_torch.export() (or PyTorch's "
        "save_compiled_function()): copy it anew, or export it again"
    )
