"""Which PyTorch versions this package supports, and the one sentence that reports an unsupported one.

A minor version older than the tested ones is refused; a newer one is accepted with one warning
(docs/pytorch-versions.md).

PyTorch's C++ classes change between minor versions, so one binary serves one minor version (CPU and CUDA builds alike).
The build records its PyTorch in _build_info.py, and the import compares the two before it loads the extension: a
mismatch would otherwise show as undefined symbols or a crash. Standard library only: the build reads this file too.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import runpy
import sys
import urllib.parse
from pathlib import Path

SUPPORTED_MINORS = ("2.11", "2.12", "2.13", "2.14", "2.15")


def minor_of(version: str) -> str:
    """'2.13.0+cpu' -> '2.13'."""
    return ".".join(version.split("+", 1)[0].split(".")[:2])


def _order(minor: str) -> tuple[int, ...]:
    """'2.13' -> (2, 13). A part that is not a number counts as newest, so that an unusual version is accepted."""
    return tuple(int(part) if part.isdigit() else sys.maxsize for part in minor.split("."))


def too_old(torch_version: str) -> bool:
    return _order(minor_of(torch_version)) < _order(SUPPORTED_MINORS[0])


def untested(torch_version: str) -> str | None:
    """The warning for a PyTorch newer than all tested versions; None otherwise."""
    if _order(minor_of(torch_version)) <= _order(SUPPORTED_MINORS[-1]):
        return None
    # Loaded by path: the build reads this file and cannot import the package.
    own = runpy.run_path(str(Path(__file__).with_name("_version.py")))["__version__"]
    return (
        f"PyTorch {torch_version} is not tested with ark_torch {own}, which knows {supported_text()}: if "
        'something fails, try one of those, or ARK_DISABLE=1 (torch.compile: backend="inductor").'
    )


def supported_text() -> str:
    return ", ".join(SUPPORTED_MINORS[:-1]) + " and " + SUPPORTED_MINORS[-1]


def rebuild_command() -> str:
    """The pip command that rebuilds the extension from its original source, bypassing pip's cache of old wheels."""
    source = "ark_torch"
    try:
        text = importlib.metadata.distribution("ark_torch").read_text("direct_url.json")
        origin = json.loads(text) if text else {}
        url = str(origin.get("url", ""))
        if url.startswith("file://") and "dir_info" in origin:
            path = urllib.parse.unquote(urllib.parse.urlparse(url).path)
            source = ("-e " if origin["dir_info"].get("editable") else "") + path
    except Exception:  # no readable metadata: the plain name is still a usable hint
        pass
    return f"python -m pip install --no-cache-dir --force-reinstall --no-deps {source}"


def no_torch(interpreter: str, why: str = "no module named torch") -> str:
    """The build's error message when it finds no PyTorch."""
    return (
        f"ark_torch is built against the PyTorch of its environment, and {interpreter} finds none ({why}): install it "
        f"first (python -m pip install 'torch=={SUPPORTED_MINORS[-1]}.*'); if it is installed (uv, or a machine "
        "without a network), add --no-build-isolation, with scikit-build-core, cmake and ninja installed."
    )


def problem(torch_version: str, built_for: str | None) -> str | None:
    """Why this ark_torch cannot work with that PyTorch, as one sentence with its remedy; None if it can.

    built_for: the PyTorch version that the extension was built against; None if there is no extension.
    """
    if too_old(torch_version):
        return (
            f"ark_torch supports PyTorch {SUPPORTED_MINORS[0]} and newer, and this environment has {torch_version}: "
            f"install a supported one (python -m pip install 'torch=={SUPPORTED_MINORS[-1]}.*'), then run "
            f"`{rebuild_command()}`."
        )
    if built_for is None:
        return f"ark_torch's extension has not been built: run `{rebuild_command()}`."
    if minor_of(built_for) != minor_of(torch_version):
        return (
            f"ark_torch was built for PyTorch {built_for}, and this environment has {torch_version}: "
            "something installed since has replaced PyTorch. Build ark_torch for it: "
            f"`{rebuild_command()}`; or go back: `python -m pip install 'torch=={minor_of(built_for)}.*'`."
        )
    return None


def requirers() -> list[str]:
    """Installed packages that pin a torch version, 'torchvision 0.29.1 (torch==2.14.1)': they may replace PyTorch."""
    found = set()
    for package in importlib.metadata.distributions():
        name = str(package.metadata["Name"])
        for requirement in package.requires or []:
            asked = re.match(r"torch\s*\(?\s*([=<>!~][^;)]*)", requirement)
            if asked and "extra ==" not in requirement and name.replace("-", "_") != "ark_torch":
                found.add(f"{name} {package.version} (torch{asked.group(1).strip()})")
    return sorted(found)


def built_for() -> str | None:
    """The PyTorch version that the extension was built against; None if it has not been built."""
    try:
        from ark_torch._build_info import TORCH_VERSION
    except Exception:  # missing or malformed
        return None
    return str(TORCH_VERSION)
