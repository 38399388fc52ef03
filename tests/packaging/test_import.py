"""Importing: every order works, other backends are not affected, and a wrong PyTorch gives a one-sentence error."""

from __future__ import annotations

import json
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

import ark_torch
from ark_torch import _support

GROUP_OF_ONE = """
import torch, torch.distributed as dist
dist.init_process_group({backend!r}, store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.arange(3.0)
dist.all_reduce(tensor)
assert tensor.tolist() == [0, 1, 2], tensor
dist.destroy_process_group()
print("done")
"""

of_imports = pytest.mark.changed("ark_torch/_*.py", "ark_torch/__init__.py", "pyproject.toml", "setup.py")
ORDERS = {
    "ark_torch first": "import ark_torch, torch",
    "torch first": "import torch, ark_torch",
    "neither": "",
    "twice": "import ark_torch, torch, importlib; importlib.reload(ark_torch); from ark_torch import _autoload; "
    "_autoload.register(); _autoload.register()",
    "distributed first": "import torch.distributed, ark_torch",
}


@of_imports
@pytest.mark.parametrize("order", ORDERS)
def test_every_import_order_gives_a_working_group(python, order: str) -> None:
    done = python(["-W", "error", "-c", ORDERS[order] + GROUP_OF_ONE.format(backend="ark")])
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


@of_imports
@pytest.mark.parametrize("order", ["ark_torch first", "torch first", "twice", "distributed first"])
def test_explicit_import_is_enough_without_autoload(python, order: str) -> None:
    script = ORDERS[order] + GROUP_OF_ONE.format(backend="ark")
    done = python(["-W", "error", "-c", script], TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


def test_without_autoload_and_import(python) -> None:
    """The name is unknown, but where PyTorch has entry points for distributed backends (since 2.14)."""
    from torch.distributed.distributed_c10d import Backend

    done = python(GROUP_OF_ONE.format(backend="ark"), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (done.returncode == 0) == hasattr(Backend, "_ensure_backend_registered"), done.stderr


@of_imports
@pytest.mark.parametrize("backend", ["ark", "ARK", "cpu:ark"])
def test_names_of_the_backend(python, backend: str) -> None:
    done = python(GROUP_OF_ONE.format(backend=backend))
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


def test_importing_loads_no_extension(python) -> None:
    script = "import sys, torch, ark_torch; print(sorted(m for m in sys.modules if m.startswith('ark_torch')))"
    loaded = python(script).stdout
    assert "ark_torch._autoload" in loaded
    assert "ark_torch._C" not in loaded and "ark_torch.distributed" not in loaded


def test_entry_points_name_what_exists() -> None:
    for group in ("torch.backends", "torch.distributed.backends", "torch_dynamo_backends"):
        found = [entry for entry in entry_points(group=group) if entry.name == "ark"]
        assert found, f"no entry point in {group}"
        assert callable(found[0].load())


# A program's view of another backend's group, with and without the package's registration.
OTHER_BACKENDS = """
import json, torch, torch.distributed as dist
seen = {}
for backend in ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", None]:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.barrier()
    try:
        hooks = group._has_hooks()
    except RuntimeError as error:
        hooks = str(error)
    seen[str(backend)] = [group.name(), hooks, dist.get_backend(), dist.get_backend_config(group), tensor.tolist(),
                          type(group._get_backend(torch.device("cpu"))).__name__]
    dist.destroy_process_group()
seen["defaults"] = dist.Backend.default_device_backend_map
seen["plugins"] = sorted(dist.Backend._plugins)
print(json.dumps(seen))
"""


@pytest.mark.nightly
def test_programs_of_other_backends_notice_nothing(python) -> None:
    without = python(OTHER_BACKENDS, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    having = python(OTHER_BACKENDS)
    assert without.returncode == 0, without.stderr
    assert having.returncode == 0, having.stderr
    assert json.loads(having.stdout) == json.loads(without.stdout)
    assert json.loads(having.stdout)["cpu:gloo"][0] == "gloo"


MIXED = """
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig
for text in ["ark", "cpu:gloo,cuda:ark", "cpu:ark,cuda:nccl", "cpu:ark"]:
    print(text, "=", BackendConfig(Backend(text)))
"""


@pytest.mark.nightly
def test_mixed_names_parse(python) -> None:
    done = python(MIXED)
    assert done.stdout.splitlines() == [
        "ark = cpu:ark,cuda:ark",
        "cpu:gloo,cuda:ark = cpu:gloo,cuda:ark",
        "cpu:ark,cuda:nccl = cpu:ark,cuda:nccl",
        "cpu:ark = cpu:ark",
    ], done.stderr


ASK = {
    "explicit import": "import ark_torch",
    "after torch": "import torch, ark_torch",
    "a second time": "try:\n    import ark_torch\nexcept ImportError:\n    pass\nimport ark_torch",
    "asking for the backend": "import torch.distributed as dist\n"
    "dist.init_process_group('ark', store=dist.HashStore(), rank=0, world_size=1)",
}


def supporting(*minors: str) -> str:
    """Returns the text of _support.py with these minor versions."""
    text = Path(_support.__file__).read_text()
    return re.sub(r"(?m)^SUPPORTED_MINORS = .*$", f"SUPPORTED_MINORS = {minors!r}", text)


@pytest.fixture(params=["another minor", "no extension", "unsupported PyTorch"])
def spoilt(request, copied_package):
    """(folder for PYTHONPATH, what the error must say)"""
    if request.param == "another minor":
        return copied_package(_build_info='TORCH_VERSION = "2.10.1+cpu"\n'), r"was built for PyTorch 2\.10\.1\+cpu"
    if request.param == "no extension":
        return copied_package(_build_info="TORCH_VERSION = \n"), "has not been built"
    text = supporting("98.1", "98.2")
    return copied_package(_support=text), r"supports PyTorch 98\.1 and newer, and this environment has " + re.escape(
        torch.__version__
    )


@of_imports
@pytest.mark.parametrize("way", ASK)
def test_a_wrong_pytorch_is_told_in_one_sentence(python, spoilt, way: str) -> None:
    folder, expected = spoilt
    done = python(ASK[way], path=folder)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0
    assert re.search(r"IncompatibleTorch: .*" + expected, last), done.stderr
    assert "pip install --no-cache-dir --force-reinstall --no-deps" in last


@of_imports
def test_import_torch_survives_a_spoilt_package(python, spoilt) -> None:
    folder, _ = spoilt
    done = python("import torch, torch.distributed as dist\n" + GROUP_OF_ONE.format(backend="gloo"), path=folder)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


def test_import_torch_survives_a_registration_that_raises(python) -> None:
    script = """
import sys, types
class Broken(types.ModuleType):
    def __getattr__(self, name):
        raise RuntimeError("broken on purpose")
import torch
from ark_torch import _autoload
_autoload._registered = False
sys.modules["torch.distributed"] = Broken("torch.distributed")
torch.distributed = sys.modules["torch.distributed"]
_autoload.register()
try:
    _autoload.on_import()
except ImportError as error:
    print(error, "|", error.__cause__)
"""
    done = python(script)
    assert "could not register" in done.stdout and "broken on purpose" in done.stdout, done.stderr


@pytest.mark.nightly
def test_compile_backend_is_found_by_name(python) -> None:
    """It loads neither Inductor nor the extension before a graph arrives."""
    script = """
import sys, torch
assert "ark" in torch._dynamo.list_backends()
from ark_torch.compile import ark
assert not {"torch._inductor.compile_fx", "ark_torch._C"} & set(sys.modules)
with torch.no_grad():
    options = {"choose": "ark", "fallback": False}
    compiled = torch.compile(lambda x: torch.tanh(x) * 2 + 1, backend="ark", options=options)
    x = torch.linspace(-2, 2, 20)
    torch.testing.assert_close(compiled(x), torch.tanh(x) * 2 + 1)
    try:
        torch.compile(lambda x: x + 1, backend="ark", options={"chose": "ark"})(x)
    except Exception as error:
        print(error)
"""
    done = python(script)
    assert "options['chose'] is not known" in done.stdout, done.stderr


@pytest.mark.quick
def test_minor_of() -> None:
    assert [_support.minor_of(text) for text in ("2.13.0+cpu", "2.11.1", "2.14.0.dev20260101+cu130")] == [
        "2.13",
        "2.11",
        "2.14",
    ]
    assert _support.problem("2.13.9+cu130", "2.13.0+cpu") is None


@pytest.mark.quick
def test_what_is_too_old_and_what_is_newer_than_all_tested() -> None:
    oldest, newest = _support.SUPPORTED_MINORS[0], _support.SUPPORTED_MINORS[-1]
    major, minor = (int(part) for part in newest.split("."))
    assert "supports PyTorch" in str(_support.problem("2.9.1", "2.9.1")) and "2.9.1" in str(
        _support.problem("2.9.1", "2.9.1")
    )
    for version in (f"{oldest}.0+cpu", f"{newest}.3"):
        assert _support.problem(version, version) is None and _support.untested(version) is None
    for version in (f"{major}.{minor + 1}.0+cu130", f"{major + 1}.0.0", f"{major}.{minor + 1}.0.dev20270101"):
        assert _support.problem(version, version) is None
        assert f"PyTorch {version} is not tested with ark_torch {ark_torch.__version__}" in str(
            _support.untested(version)
        )


@pytest.mark.by_day("explicit import")
@pytest.mark.parametrize("way", ASK)
def test_a_newer_pytorch_is_taken_with_one_warning(python, copied_package, way: str) -> None:
    """The package knows only older minor versions, but its extension was built for the installed PyTorch."""
    folder = copied_package(_support=supporting("1.8", "1.9"))
    for library in Path(ark_torch.__file__).parent.glob("_C.*.so"):
        (folder / "ark_torch" / library.name).symlink_to(library)
    group = "import torch, torch.distributed as dist\n" + GROUP_OF_ONE.format(backend="ark")
    done = python(ASK[way] + "\n" + ("" if "init" in ASK[way] else group), path=folder)
    assert done.returncode == 0, done.stderr
    told = re.findall(
        r"UserWarning: PyTorch (\S+) is not tested with ark_torch \S+, which knows 1\.8 and 1\.9", done.stderr
    )
    assert told == [torch.__version__], done.stderr


@pytest.mark.nightly
def test_a_newer_pytorch_means_nothing_to_programs_without_ark(python, copied_package) -> None:
    folder = copied_package(_support=supporting("1.8", "1.9"))
    script = "import torch, torch.distributed as dist\n" + GROUP_OF_ONE.format(backend="gloo")
    done = python(["-W", "error", "-c", script], path=folder)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr
