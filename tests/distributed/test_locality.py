"""Which NIC a rank takes, on machines that are folders: PCI trees as /sys shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.groups import ark_only

from ark_torch import env
from ark_torch.distributed import group, locality

pytestmark = [ark_only, pytest.mark.quick]

GPU, NIC = ("0x10de", "0x030200"), ("0x15b3", "0x020700")


class Machine:
    """A tree of PCI devices below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bus/pci/devices").mkdir(parents=True)

    def device(self, path: str, kind: tuple[str, str], numa: int) -> Path:
        folder = self.root / "devices" / path
        folder.mkdir(parents=True)
        for name, text in (("vendor", kind[0]), ("class", kind[1]), ("numa_node", str(numa))):
            (folder / name).write_text(f"{text}\n")
        (self.root / "bus/pci/devices" / folder.name).symlink_to(folder)
        return folder

    def nic(self, name: str, path: str, numa: int, state: str = "4: ACTIVE") -> None:
        folder = self.device(path, NIC, numa)
        ports = self.root / "class/infiniband" / name / "ports/1"
        ports.mkdir(parents=True)
        (ports / "state").write_text(f"{state}\n")
        (self.root / "class/infiniband" / name / "device").symlink_to(folder)


@pytest.fixture
def eight(tmp_path: Path) -> Machine:
    """Two processors with two switches each, and behind every switch two GPUs and two NICs."""
    machine = Machine(tmp_path)
    for switch in range(4):
        numa, bus = switch // 2, 0x10 * (switch + 1)
        above = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        for one in range(2):
            machine.device(f"{above}/0000:{bus + 2:02x}:0{one}.0/0000:{bus + 4 + one:02x}:00.0", GPU, numa)
            path = f"{above}/0000:{bus + 2:02x}:0{one + 4}.0/0000:{bus + 8 + one:02x}:00.0"
            machine.nic(f"mlx5_{9 + 2 * (3 - switch) + one}", path, numa)  # names in another order, "mlx5_9" and "_10"
    return machine


def test_every_gpu_has_its_own_nic_behind_its_switch(eight: Machine) -> None:
    found = {}
    for switch in range(4):
        for one in range(2):
            address = f"0000:{0x10 * (switch + 1) + 4 + one:02x}:00.0"
            found[address] = locality.nearest(address, eight.root)
    expected = [f"mlx5_{9 + 2 * (3 - switch) + one}" for switch in range(4) for one in range(2)]
    assert list(found.values()) == expected


def test_what_is_down_is_passed_over(eight: Machine) -> None:
    """First one of a switch's NICs, then both: the other switch of the same processor is nearer than the other's."""
    ports = eight.root / "class/infiniband"
    (ports / "mlx5_15/ports/1/state").write_text("1: DOWN\n")
    assert [locality.nearest(f"0000:1{last}:00.0", eight.root) for last in (4, 5)] == ["mlx5_16"] * 2
    (ports / "mlx5_16/ports/1/state").write_text("2: INIT\n")
    assert [locality.nearest(f"0000:1{last}:00.0", eight.root) for last in (4, 5)] == ["mlx5_13", "mlx5_14"]


def test_where_nothing_is_known(eight: Machine, tmp_path: Path) -> None:
    assert locality.nearest("", eight.root) == locality.nearest("0000:ff:00.0", eight.root) == ""
    assert locality.nearest("0000:14:00.0", tmp_path / "nothing") == "" and locality.active(tmp_path / "nothing") == []
    for name in range(10, 17):
        (eight.root / f"class/infiniband/mlx5_{name}/ports/1/state").unlink()
    assert locality.active(eight.root) == ["mlx5_9"]
    assert locality.nearest("0000:14:00.0", eight.root) == ""  # the first is the only one


def test_which_gpu_is_a_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    class About:
        def __init__(self, index: int) -> None:
            self.pci_domain_id, self.pci_bus_id, self.pci_device_id = 0, 0x1B + index, 0

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert locality.address_of_gpu() == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", About)
    assert locality.address_of_gpu() == ""  # not known yet
    monkeypatch.setenv("LOCAL_RANK", "6")
    assert locality.address_of_gpu() == "0000:1d:00.0"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert locality.address_of_gpu() == "0000:1c:00.0"


def test_groups_take_it_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locality, "active", lambda: ["a", "b"])
    monkeypatch.setattr(locality, "address_of_gpu", lambda: "0000:1b:00.0")
    monkeypatch.setattr(locality, "nearest", lambda gpu: f"near {gpu}")

    def device(**variables: str) -> Any:
        for name in ("ARK_RDMA_DEVICE", "ARK_RDMA_LIBRARY", "ARK_NET"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return group.complete(None, env.read()).rdma.device

    assert device() == "near 0000:1b:00.0"
    assert device(ARK_RDMA_DEVICE="mlx5_3") == "mlx5_3"
    assert device(ARK_RDMA_LIBRARY=__file__) == device(ARK_NET="gloo") == ""
