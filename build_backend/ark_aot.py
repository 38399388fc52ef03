"""ARK_AOT=1 pip install .: kernels compiled by nvcc while the wheel is built, and put into it.

What is compiled, from which texts and under which names, says the extension that was just built: the very code that
looks for the kernels at run time. So the finished wheel is unpacked, nvcc compiles every kernel, and the wheel is
packed again with ark_torch/prebuilt: sources, cubins and what is known of them side by side, as in a user's cache.
NVRTC and a first-use compile are then needed only for other architectures or group sizes.

    ARK_AOT_ARCHS   architectures, "sm_90a sm_100a"; default: sm_80 sm_90a sm_100a (A100, H100 and H200, B200)
    ARK_AOT_RANKS   group sizes, "2 4 8"; default: 1 to 8. A size n needs 12n kernels, each a second of one core.
    MAX_JOBS        compilations at a time; default: one a core
    CUDA_HOME       the CUDA Toolkit; default: the one of nvcc in PATH, then /usr/local/cuda
"""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DEFAULT_ARCHS = "sm_80 sm_90a sm_100a"
DEFAULT_RANKS = "1 2 3 4 5 6 7 8"
MOST_RANKS = 8
USUAL = "/usr/local/cuda/bin"


def requested() -> bool:
    """Whether kernels are to be compiled. SystemExit, before minutes of compiling, for what would end it later."""
    text = os.environ.get("ARK_AOT", "")
    if text not in ("", "0", "1"):
        raise SystemExit(f"ARK_AOT={text!r} is not allowed: 1 compiles the CUDA kernels with nvcc, 0 does not.")
    if text == "1":
        archs(find_nvcc())
        ranks()
    return text == "1"


def words(name: str, default: str) -> list[str]:
    """The values of a variable, parted by spaces, commas or semicolons."""
    found = [word for word in re.split(r"[\s,;]+", os.environ.get(name, "")) if word]
    return found or default.split()


def ranks() -> list[int]:
    """ARK_AOT_RANKS; SystemExit naming what is wrong."""
    given = words("ARK_AOT_RANKS", DEFAULT_RANKS)
    if not all(word.isascii() and word.isdigit() and 1 <= int(word) <= MOST_RANKS for word in given):
        raise SystemExit(f"ARK_AOT_RANKS={' '.join(given)!r} is not allowed: group sizes from 1 to {MOST_RANKS}.")
    return sorted({int(word) for word in given})


def find_nvcc() -> str:
    """nvcc's path; SystemExit with the remedy where there is none."""
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", "")]
    folders = [*(f"{home}/bin" for home in homes if home), os.environ.get("PATH", os.defpath), USUAL]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    if found is None:
        raise SystemExit(
            "ARK_AOT=1 compiles the CUDA kernels with nvcc, and there is none: install the CUDA Toolkit and name its "
            "folder in CUDA_HOME, or build without ARK_AOT (kernels are then compiled at first use)."
        )
    return found


def version_of(nvcc: str) -> str:
    """ "13.0" """
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+\.\d+)", text)
    if not found:
        raise SystemExit(f"{nvcc} does not tell its version: {text[-300:]!r}")
    return found.group(1)


def archs(nvcc: str) -> list[str]:
    """ARK_AOT_ARCHS; SystemExit for one that this nvcc does not know."""
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    wanted = list(dict.fromkeys(words("ARK_AOT_ARCHS", DEFAULT_ARCHS)))
    for arch in wanted:
        if arch.rstrip("af") not in known or int(re.sub(r"\D", "", arch) or 0) < 80:
            raise SystemExit(
                f"ARK_AOT_ARCHS names {arch!r}: ark's kernels need sm_80 or newer, and {nvcc} (release "
                f"{version_of(nvcc)}) knows {' '.join(known)}"
            )
    return wanted


def add_to_wheel(wheel: Path) -> None:
    """Packs the wheel anew, with the kernels."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        fill(Path(folder))
        packed = wheel.with_suffix(".new")
        files = sorted(path for path in (Path(folder) / "ark_torch" / "prebuilt").iterdir())
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
            record = next(name for name in old.namelist() if name.endswith(".dist-info/RECORD"))
            lines = old.read(record).decode().rstrip("\n").split("\n")
            for entry in old.infolist():
                if entry.filename != record:
                    new.writestr(entry, old.read(entry), zipfile.ZIP_DEFLATED)
            for path in files:
                name, data = f"ark_torch/prebuilt/{path.name}", path.read_bytes()
                lines.insert(-1, record_line(name, data))
                new.writestr(stamped(name, old.getinfo(record)), data, zipfile.ZIP_DEFLATED)
            new.writestr(old.getinfo(record), "\n".join(lines) + "\n", zipfile.ZIP_DEFLATED)
        packed.replace(wheel)


def record_line(name: str, data: bytes) -> str:
    """What a wheel's RECORD says of a file."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}"


def stamped(name: str, like: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """An entry that all may read, of the same date as the others."""
    entry = zipfile.ZipInfo(name, like.date_time)
    entry.external_attr = 0o100644 << 16
    return entry


def fill(root: Path) -> None:
    """ark_torch/prebuilt in the folder that holds the built package, by a Python that loads it from there."""
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith("ARK_") or "AOT" in name},
        "PYTHONPATH": os.pathsep.join([str(root), *(path for path in sys.path if path)]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    done = subprocess.run([sys.executable, os.path.abspath(__file__), str(root)], env=environment, cwd=root)
    if done.returncode:
        raise SystemExit("ARK_AOT=1: the CUDA kernels could not be compiled (see above).")


def compile_all(root: Path) -> None:
    """What runs in that Python."""
    from ark_torch import _C, _jit

    if not Path(_C.__file__).is_relative_to(root):
        raise SystemExit(f"meant to load the extension from {root}, and got {_C.__file__}")
    _jit.configure()
    nvcc = find_nvcc()
    compiler = f"nvcc {version_of(nvcc)}"
    folder = root / "ark_torch" / "prebuilt"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    jobs = [
        (name, text, arch)
        for name, text, oldest in _C._kernel_stubs(ranks())
        for arch in archs(nvcc)
        if int(re.sub(r"\D", "", arch)) >= oldest
    ]

    def one(job: tuple[str, str, str]) -> None:
        name, text, arch = job
        with tempfile.TemporaryDirectory() as scratch:
            source, cubin = Path(scratch, "stub.cu"), Path(scratch, "stub.cubin")
            source.write_text(text)
            command = [nvcc, *_C._prebuilt_options(arch), "-I", root / "ark_torch" / "kernels", "-cubin", "-o", cubin]
            done = subprocess.run([*map(str, command), str(source)], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{compiler} does not compile {name} for {arch}:\n{done.stderr[-4000:]}")
            _C._store_prebuilt(str(folder), compiler, text, arch, cubin.read_bytes(), done.stderr)

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))) as pool:
        for count, _ in enumerate(pool.map(one, jobs), 1):
            if count % 50 == 0 or count == len(jobs):
                print(f"{compiler}: {count} of {len(jobs)} kernels", flush=True)
    index = {"schema": "ark_prebuilt", "compiler": compiler, "archs": archs(nvcc), "ranks": ranks()}
    (folder / "index.json").write_text(json.dumps(index, separators=(",", ":")) + "\n")
    for path in folder.iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    compile_all(Path(sys.argv[1]).resolve())
