"""The environment variables: defaults, every kind of bad value, and the README's table."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from ark_torch import env

REPO = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.quick


def test_every_variable_has_a_field_and_a_default() -> None:
    settings = env.read({})
    assert [field.name for field in fields(env.Settings)] == [variable.field for variable in env.VARIABLES]
    for variable in env.VARIABLES:
        assert getattr(settings, variable.field) == variable.default
        assert env.read({variable.name: " "}) == settings, "an empty variable counts as unset"


def test_good_values(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text("{}")
    values = {
        "ARK_DISABLE": "1",
        "ARK_DEBUG": "0",
        "ARK_SHARED_MEMORY": "OFF",
        "ARK_FLIGHT_RECORD": "0",
        "ARK_FLIGHT_DUMP": str(tmp_path / "flight-"),
        "ARK_NODE": "3",
        "ARK_NET": "rdma",
        "ARK_RDMA_DEVICE": "mlx5_0",
        "ARK_RDMA_PORT": "1",
        "ARK_RDMA_GID_INDEX": "3",
        "ARK_RDMA_MTU": "1024",
        "ARK_RDMA_TRAFFIC_CLASS": "106",
        "ARK_RDMA_SERVICE_LEVEL": "3",
        "ARK_RDMA_PKEY_INDEX": "0",
        "ARK_RDMA_TIMEOUT": "14",
        "ARK_RDMA_RETRY_COUNT": "5",
        "ARK_RDMA_RNR_RETRY": "6",
        "ARK_RDMA_CACHE_MB": "64",
        "ARK_RDMA_LIBRARY": str(table),
        "ARK_SPIN_US": "auto",
        "ARK_DISPATCH": str(table),
        "ARK_CACHE": str(tmp_path / "new" / "kernels"),
        "ARK_COSTS": "assumed",
        "ARK_TRACE": str(tmp_path / "trace.json"),
        "ARK_TRACE_MB": "8",
        "ARK_DUMP_PASSES": str(tmp_path / "passes"),
        "ARK_NVRTC": str(table),
        "ARK_BUFFER_MB": "64",
        "ARK_REDUCTION": "fast",
        "ARK_ORDER": "flat",
        "ARK_PARTIALS": "input",
        "ARK_SHARE_GPU": "1",
        "ARK_DISABLE_P2P": "1",
        "ARK_TIMING": "1",
        "ARK_TUNE": "0",
        "ARK_OPTIMISE": "1",
        "CXX": "ccache g++",
    }
    assert set(values) == {variable.name for variable in env.VARIABLES}, "a new variable wants a good value here"
    expected = env.Settings(
        True,
        False,
        "off",
        0,
        values["ARK_FLIGHT_DUMP"],
        True,
        3,
        "rdma",
        "mlx5_0",
        1,
        3,
        "1024",
        106,
        3,
        0,
        14,
        5,
        6,
        64,
        str(table),
        "auto",
        str(table),
        False,
        64,
        "fast",
        "flat",
        "input",
        True,
        "1",
        values["ARK_CACHE"],
        "assumed",
        values["ARK_TRACE"],
        8,
        values["ARK_DUMP_PASSES"],
        str(table),
        1,
        "ccache g++",
    )
    assert env.read(values) == expected
    assert env.read({"ARK_SPIN_US": "7"}).spin_us == 7
    assert env.read({"ARK_CACHE": "~/kernels"}).cache == str(Path.home() / "kernels"), "the shell leaves it in quotes"


BAD = [
    ("ARK_COSTS", "guessed", "measured or assumed"),
    ("ARK_OPTIMISE", "4", "from 0 to 3"),
    ("ARK_DISABLE", "yes", "0 or 1"),
    ("ARK_DISABLE", "2", "0 or 1"),
    ("ARK_DEBUG", "true", "0 or 1"),
    ("ARK_SHARED_MEMORY", "maybe", "auto, on or off"),
    ("ARK_FLIGHT_RECORD", "-1", "from 0 to 1048576"),
    ("ARK_FLIGHT_RECORD", "1048577", "from 0 to 1048576"),
    ("ARK_FLIGHT_RECORD", "auto", "from 0 to 1048576"),
    ("ARK_FLIGHT_RECORD", "\u0661", "from 0 to 1048576"),  # a digit, but not in ASCII
    ("ARK_FLIGHT_RECORD", "1e3", "from 0 to 1048576"),
    ("ARK_FLIGHT_DUMP", "/no/such/folder/flight-", "its folder must exist"),
    ("ARK_NODE", "-1", "auto, or a whole number from 0 to 1000000"),
    ("ARK_NET", "ethernet", "auto, rdma or gloo"),
    ("ARK_RDMA_DEVICE", "../mlx5_0", "names of letters, digits, _ and -, with commas between"),
    ("ARK_RDMA_PORT", "0", "from 1 to 255"),
    ("ARK_RDMA_GID_INDEX", "256", "from 0 to 255"),
    ("ARK_RDMA_MTU", "1500", "auto, 256, 512, 1024, 2048 or 4096"),
    ("ARK_RDMA_TRAFFIC_CLASS", "256", "from 0 to 255"),
    ("ARK_RDMA_SERVICE_LEVEL", "16", "from 0 to 15"),
    ("ARK_RDMA_PKEY_INDEX", "-1", "from 0 to 65535"),
    ("ARK_RDMA_TIMEOUT", "32", "from 0 to 31"),
    ("ARK_RDMA_RETRY_COUNT", "8", "from 0 to 7"),
    ("ARK_RDMA_RNR_RETRY", "8", "from 0 to 7"),
    ("ARK_RDMA_CACHE_MB", "much", "from 0 to 1048576"),
    ("ARK_RDMA_LIBRARY", "/no/such/libibverbs.so.1", "the path of a readable file"),
    ("ARK_SPIN_US", "0.5", "auto, or a whole number from 0 to 1000000"),
    ("ARK_SPIN_US", "1000001", "auto, or a whole number from 0 to 1000000"),
    ("ARK_DISPATCH", "/no/such/table.json", "the path of a readable file"),
    ("ARK_CACHE", "/dev/null", "the path of a folder"),
    ("ARK_CACHE", "/dev/null/kernels", "the path of a folder"),
    ("ARK_TRACE", "/no/such/folder/trace.json", "its folder must exist"),
    ("ARK_TRACE_MB", "0", "from 1 to 16384"),
    ("ARK_DUMP_PASSES", "/dev/null", "the path of a folder"),
    ("ARK_NVRTC", "/no/such/libnvrtc.so.13", "the path of a readable file"),
    ("ARK_BUFFER_MB", "-1", "from 0 to 1048576"),
    ("ARK_BUFFER_MB", "64 MB", "from 0 to 1048576"),
    ("ARK_REDUCTION", "quick", "exact or fast"),
    ("ARK_ORDER", "rank", "node or flat"),
    ("ARK_PARTIALS", "bf16", "float32 or input"),
    ("ARK_SHARE_GPU", "yes", "0 or 1"),
    ("ARK_DISABLE_P2P", "yes", "auto, 0 or 1"),
    ("ARK_TIMING", "on", "0 or 1"),
    ("ARK_TUNE", "2", "0 or 1"),
    ("CXX", "g++ 'x", "a program, with arguments"),
]


@pytest.mark.parametrize(("name", "text", "allowed"), BAD)
def test_bad_values_name_the_variable_and_what_is_allowed(name: str, text: str, allowed: str) -> None:
    with pytest.raises(ValueError) as caught:
        env.read({name: text})
    message = str(caught.value)
    assert message.startswith(f"{name}={text!r} is not allowed: ") and allowed in message


def test_every_variable_refuses_something() -> None:
    assert {name for name, _, _ in BAD} == {variable.name for variable in env.VARIABLES}


def test_misspelt_names_are_found() -> None:
    found = env.unknown({"ARK_SPIN": "1", "ARK_SPIN_US": "1", "ARK_TEST_RANKS": "2", "PATH": "", "ARKANSAS": "1"})
    assert found == {"ARK_SPIN": "did you mean ARK_SPIN_US?"}
    for name, meant in (("ARK_DISPACH", "ARK_DISPATCH"), ("ark_debug", "ARK_DEBUG"), ("ARKDEBUG", "ARK_DEBUG")):
        assert env.unknown({name: "1"}) == {name: f"did you mean {meant}?"}
    (told,) = env.unknown({"ARK_PIZZA": "1"}).values()
    assert "did you mean" not in told and "ARK_DEBUG" in told and "ARK_AOT" in told


def test_no_other_file_reads_our_variables() -> None:
    """Variables are declared once. A second reader could accept other values."""
    pattern = re.compile(r"""(?:environ(?:\.get)?|getenv)\s*[\[(]\s*["']ARK_""")
    sources = [*REPO.glob("ark_torch/**/*.py"), *REPO.glob("csrc/**/*.[ch]pp")]
    assert len(sources) > 10
    assert [str(path.relative_to(REPO)) for path in sources if pattern.search(path.read_text())] == []
