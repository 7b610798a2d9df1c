"""The NVML stand-in through NVIDIA's own Python binding: each topology tells of itself as it is.

Knows nothing of how the stand-in is made.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pytest
from emulated_gpu.child import in_child, run_in_child

pytest.importorskip("pynvml", reason="install .[test,cuda13]")


@dataclass(frozen=True)
class Machine:
    """What NVML should tell of one topology. ``near`` is the common ancestor of GPUs 0 and 1."""

    topology: str
    gpus: int
    name: str
    numa_nodes: tuple[int, ...]
    pcie: tuple[int, int]  # generation, lanes
    near: str
    links: int = 0
    link_version: str = ""
    link_mbps: int = 0
    switched: bool = False


MACHINES = (
    Machine(
        topology="nvswitch8",
        gpus=8,
        name="Emulated H100 SXM",
        numa_nodes=(0, 0, 0, 0, 1, 1, 1, 1),
        pcie=(5, 16),
        near="NODE",
        links=18,
        link_version="4_0",
        link_mbps=26562,
        switched=True,
    ),
    Machine("pcie4", 4, "Emulated L40", (0, 0, 0, 0), (4, 16), near="SINGLE"),
    Machine(
        topology="islands2",
        gpus=4,
        name="Emulated A100 island",
        numa_nodes=(0, 0, 1, 1),
        pcie=(4, 16),
        near="NODE",
        links=12,
        link_version="3_0",
        link_mbps=25000,
    ),
    Machine("partial", 4, "Emulated A40", (0, 0, 0, 0), (4, 16), near="HOSTBRIDGE"),
)
every_machine = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.topology)


def on(machine: Machine, body: Any) -> None:
    run_in_child(body, {"expected": asdict(machine)}, topology=machine.topology)


def check_identity(expected: dict[str, Any]) -> None:
    import cupy
    import pynvml
    from cuda.core import Device

    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == expected["gpus"] == cupy.cuda.runtime.getDeviceCount()
    assert pynvml.nvmlSystemGetCudaDriverVersion() == cupy.cuda.runtime.driverGetVersion()
    for number in range(expected["gpus"]):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(number)
        properties = cupy.cuda.runtime.getDeviceProperties(number)
        assert pynvml.nvmlDeviceGetName(gpu) == expected["name"] == properties["name"].decode()
        assert pynvml.nvmlDeviceGetMinorNumber(gpu) == number
        assert pynvml.nvmlDeviceGetMemoryInfo(gpu).total == properties["totalGlobalMem"]
        assert pynvml.nvmlDeviceGetComputeRunningProcesses(gpu) == []
        uuid, bus_id = pynvml.nvmlDeviceGetUUID(gpu), pynvml.nvmlDeviceGetPciInfo(gpu).busId
        assert uuid == f"GPU-{Device(number).uuid}"  # CuPy's property ends at the first zero byte
        assert bus_id[4:].lower() == cupy.cuda.Device(number).pci_bus_id.lower()
        for found in (
            pynvml.nvmlDeviceGetHandleByUUID(uuid),
            pynvml.nvmlDeviceGetHandleByPciBusId(bus_id),
            pynvml.nvmlDeviceGetHandleByPciBusId(cupy.cuda.Device(number).pci_bus_id),
        ):
            assert pynvml.nvmlDeviceGetIndex(found) == number


@every_machine
def test_gpus_are_those_that_cuda_sees(machine: Machine) -> None:
    on(machine, check_identity)


def check_host_side(expected: dict[str, Any]) -> None:
    import os

    import pynvml

    pynvml.nvmlInit()
    generation, lanes = expected["pcie"]
    processors: dict[int, int] = {}
    for number, node in enumerate(expected["numa_nodes"]):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(number)
        assert pynvml.nvmlDeviceGetNumaNodeId(gpu) == node
        assert list(pynvml.nvmlDeviceGetMemoryAffinity(gpu, 1, 0)) == [1 << node]
        words = list(pynvml.nvmlDeviceGetCpuAffinity(gpu, 16))
        mask = sum(word << (64 * i) for i, word in enumerate(words))
        assert processors.setdefault(node, mask) == mask
        assert pynvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu) == generation
        assert pynvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu) == generation
        assert pynvml.nvmlDeviceGetMaxPcieLinkWidth(gpu) == lanes
        assert pynvml.nvmlDeviceGetCurrPcieLinkWidth(gpu) == lanes
        assert pynvml.nvmlDeviceGetPcieSpeed(gpu) == {4: 16000, 5: 32000}[generation]
    together = 0
    for mask in processors.values():
        assert mask
        together |= mask
    assert together.bit_count() == os.cpu_count()


@every_machine
def test_gpus_are_near_their_node_and_on_their_bus(machine: Machine) -> None:
    on(machine, check_host_side)


def check_links(expected: dict[str, Any]) -> None:
    import pynvml as nvml

    nvml.nvmlInit()
    for number in range(expected["gpus"]):
        gpu = nvml.nvmlDeviceGetHandleByIndex(number)
        fields = nvml.nvmlDeviceGetFieldValues(
            gpu,
            [
                nvml.NVML_FI_DEV_NVLINK_LINK_COUNT,
                nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON,
                nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_L11,
                (nvml.NVML_FI_DEV_NVLINK_GET_SPEED, 3),
            ],
        )
        assert fields[0].value.uiVal == expected["links"]
        assert {field.value.uiVal for field in fields[1:]} == {expected["link_mbps"]}
        if not expected["links"]:
            assert {field.nvmlReturn for field in fields[1:]} == {nvml.NVML_ERROR_NOT_SUPPORTED}
            with pytest.raises(nvml.NVMLError_NotSupported):
                nvml.nvmlDeviceGetNvLinkState(gpu, 0)
            continue
        version = getattr(nvml, f"NVML_NVLINK_VERSION_{expected['link_version']}")
        far_end = (
            nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
            if expected["switched"]
            else nvml.NVML_NVLINK_DEVICE_TYPE_GPU
        )
        for link in range(expected["links"]):
            assert nvml.nvmlDeviceGetNvLinkState(gpu, link) == 1
            assert nvml.nvmlDeviceGetNvLinkVersion(gpu, link) == version
            assert nvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link) == far_end
            assert nvml.nvmlDeviceGetNvLinkCapability(gpu, link, nvml.NVML_NVLINK_CAP_P2P_SUPPORTED)
            bus_id = nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).busId
            if expected["switched"]:
                with pytest.raises(nvml.NVMLError_NotFound):
                    nvml.nvmlDeviceGetHandleByPciBusId(bus_id)
            else:
                partner = nvml.nvmlDeviceGetHandleByPciBusId(bus_id)
                assert nvml.nvmlDeviceGetIndex(partner) == number ^ 1
        with pytest.raises(nvml.NVMLError_InvalidArgument):
            nvml.nvmlDeviceGetNvLinkState(gpu, expected["links"])


@every_machine
def test_links_tell_version_speed_and_far_end(machine: Machine) -> None:
    on(machine, check_links)


def check_pairs(expected: dict[str, Any]) -> None:
    import cupy
    import pynvml as nvml

    nvml.nvmlInit()
    gpus = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(expected["gpus"])]
    nodes = expected["numa_nodes"]
    near, far = getattr(nvml, f"NVML_TOPOLOGY_{expected['near']}"), nvml.NVML_TOPOLOGY_SYSTEM
    ok = nvml.NVML_P2P_STATUS_OK
    for a, gpu_a in enumerate(gpus):
        assert nvml.nvmlDeviceGetTopologyCommonAncestor(gpu_a, gpu_a) == 0
        at_level: dict[int, list[int]] = {near: [], far: []}
        for b, gpu_b in enumerate(gpus):
            if a == b:
                continue
            level = near if nodes[a] == nodes[b] else far
            at_level[level].append(b)
            assert nvml.nvmlDeviceGetTopologyCommonAncestor(gpu_a, gpu_b) == level
            reads, writes, linked = (
                nvml.nvmlDeviceGetP2PStatus(gpu_a, gpu_b, asked) == ok
                for asked in (
                    nvml.NVML_P2P_CAPS_INDEX_READ[0],  # a tuple in the binding
                    nvml.NVML_P2P_CAPS_INDEX_WRITE,
                    nvml.NVML_P2P_CAPS_INDEX_NVLINK,
                )
            )
            assert reads == writes == cupy.cuda.runtime.deviceCanAccessPeer(a, b)
            assert linked == (expected["links"] > 0 and reads)
        for level, others in at_level.items():
            nearest = nvml.nvmlDeviceGetTopologyNearestGpus(gpu_a, level)
            assert [nvml.nvmlDeviceGetIndex(gpu) for gpu in nearest] == others


@every_machine
def test_pairs_of_gpus_are_as_near_as_cuda_lets_them(machine: Machine) -> None:
    on(machine, check_pairs)


@in_child(topology="islands2", gpus=3)
def test_a_link_without_a_far_end_is_down() -> None:
    import pynvml as nvml

    nvml.nvmlInit()
    lonely = nvml.nvmlDeviceGetHandleByIndex(2)
    assert nvml.nvmlDeviceGetNvLinkState(lonely, 0) == 0
    with pytest.raises(nvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetNvLinkRemotePciInfo(lonely, 0)


@in_child(gpus=2)
def test_what_nvml_lacks_and_what_comes_too_early_raise() -> None:
    import pynvml as nvml

    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(nvml.NVMLError_FunctionNotFound):
        nvml.nvmlDeviceGetTemperature(gpu, 0)
    with pytest.raises(nvml.NVMLError_InvalidArgument):
        nvml.nvmlDeviceGetHandleByIndex(2)
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetHandleByUUID("GPU-none")
    nvml.nvmlShutdown()
    with pytest.raises(nvml.NVMLError_Uninitialized):
        nvml.nvmlDeviceGetCount()


@in_child(gpus=4, visible="2,0")
def test_nvml_sees_all_gpus_whatever_cuda_may_see() -> None:
    import cupy
    import pynvml as nvml
    from cuda.core import Device

    nvml.nvmlInit()
    assert nvml.nvmlDeviceGetCount() == 4
    assert cupy.cuda.runtime.getDeviceCount() == 2
    uuids = [nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(n)) for n in (2, 0)]
    assert [f"GPU-{Device(number).uuid}" for number in range(2)] == uuids
