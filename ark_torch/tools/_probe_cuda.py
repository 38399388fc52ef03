"""The doctor's check of the CUDA driver, the GPUs and NVRTC. A script in its own process, which a broken driver may
crash. Prints a JSON list of rows. Calls the driver through ctypes, so that it works without PyTorch."""

from __future__ import annotations

import ctypes
import glob
import json
import os
import sysconfig
from typing import Any

Rows = list[dict[str, str]]


def row(probe: str, state: str, found: str, advice: str = "") -> dict[str, str]:
    return {"probe": probe, "state": state, "found": found, "advice": advice}


def call(driver: Any, name: str, *arguments: Any) -> int:
    return int(getattr(driver, name)(*arguments))


def error_text(driver: Any, code: int) -> str:
    text = ctypes.c_char_p()
    known = call(driver, "cuGetErrorString", code, ctypes.byref(text)) == 0 and text.value
    return f"{text.value.decode()} (error {code})" if known and text.value else f"error {code}"


def driver_rows() -> Rows:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [row("cuda driver", "info", "none (libcuda.so.1 not found): CPU only")]
    code = call(driver, "cuInit", 0)
    if code:
        return [row("cuda driver", "warn", error_text(driver, code), "the driver is there and does not start")]
    version, count = ctypes.c_int(), ctypes.c_int()
    call(driver, "cuDriverGetVersion", ctypes.byref(version))
    call(driver, "cuDeviceGetCount", ctypes.byref(count))
    text = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}, {count.value} GPU(s)"
    rows = [row("cuda driver", "ok", text)]
    for index in range(count.value):
        rows.append(row(f"gpu {index}", "ok", device_text(driver, index)))
    if count.value > 1:
        rows.append(peer_row(driver, count.value))
    return rows


def device_text(driver: Any, index: int) -> str:
    name = ctypes.create_string_buffer(128)
    size, value, handle = ctypes.c_size_t(), ctypes.c_int(), ctypes.c_int()
    call(driver, "cuDeviceGet", ctypes.byref(handle), index)
    call(driver, "cuDeviceGetName", name, len(name), handle)
    call(driver, "cuDeviceTotalMem_v2", ctypes.byref(size), handle)
    numbers = []
    for attribute in (75, 76, 16):  # compute capability (major, minor), number of SMs
        call(driver, "cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        numbers.append(value.value)
    return f"{name.value.decode()}, sm_{numbers[0]}{numbers[1]}, {numbers[2]} SMs, {size.value >> 30} GiB"


def peer_row(driver: Any, count: int) -> dict[str, str]:
    cut = []
    for one in range(count):
        for two in range(count):
            yes = ctypes.c_int()
            if one != two and (call(driver, "cuDeviceCanAccessPeer", ctypes.byref(yes), one, two) or not yes.value):
                cut.append(f"{one}->{two}")
    if cut:
        return row("peer access", "warn", "missing: " + " ".join(cut), "these pairs cannot write each other's memory")
    return row("peer access", "ok", f"between all {count} GPUs")


def nvrtc_rows() -> Rows:
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    found = [
        path for folder in folders for path in glob.glob(os.path.join(folder, "nvidia", "*", "lib", "libnvrtc.so.*"))
    ]
    for path in [*sorted(found), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]:
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return [row("nvrtc", "ok", f"{major.value}.{minor.value} at {path}")]
    return [row("nvrtc", "info", "none: only needed for CUDA tensors (it comes with PyTorch's CUDA wheels)")]


def prebuilt_rows() -> Rows:
    """The wheel's prebuilt kernels: with them only other GPUs and group sizes need NVRTC."""
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "prebuilt", "index.json")
    try:
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
        sizes = " ".join(str(size) for size in index["ranks"])
        text = f"{index['compiler']}, {' '.join(index['archs'])}, for groups of {sizes}"
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [row("prebuilt kernels", "warn", f"{type(error).__name__}: {error}", "install ark_torch again")]
    return [row("prebuilt kernels", "ok", text)]


if __name__ == "__main__":
    print(json.dumps(driver_rows() + nvrtc_rows() + prebuilt_rows()))
