"""Asks NVML how the GPUs of this machine are linked: the only place that knows nvidia-ml-py.

Knows nothing of CUDA. Each question may be refused on its own; then its answer is None. GPUs are
named by UUID: NVML counts all of the machine, CUDA those that the process may see.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpuallreduce.links import GpuFacts, Machine, bus_id_of

__all__ = ["driver_version", "machine"]

# Driver libraries count NVLink's versions with their halves: 1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0.
NVLINK_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5}
LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # NVML_TOPOLOGY_*
NODE_SET_WORDS = 16  # NUMA nodes, 64 a word
PCI_DEVICES = Path("/sys/bus/pci/devices")


class _Nvml:
    """NVML's functions by name, each answering None where it cannot."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding

    def ask(self, name: str, *arguments: Any) -> Any:
        """What ``nvml...`` of that name says."""
        function = getattr(self.binding, f"nvml{name}", None)
        if function is None:  # an older binding
            return None
        try:
            return function(*arguments)
        except (self.binding.NVMLError, UnicodeDecodeError):
            return None

    def number(self, name: str) -> int:
        """A constant; -1 where the binding has none, which NVML answers for nothing."""
        return int(getattr(self.binding, f"NVML_{name}", -1))


@contextlib.contextmanager
def _started() -> Iterator[_Nvml | None]:
    """NVML for a while; None where there is no binding, no library or no driver."""
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except Exception:  # the binding may be missing, broken, or another package of that name
        yield None
        return
    try:
        yield _Nvml(pynvml)
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def driver_version() -> str | None:
    """The driver's version."""
    with _started() as nvml:
        return None if nvml is None else nvml.ask("SystemGetDriverVersion")


def machine(uuids: Sequence[str]) -> Machine | None:
    """The GPUs of these UUIDs, in this order, and what lies between them; None without NVML.

    A GPU that NVML does not know (a MIG instance is none to it) has nothing but its UUID. Asked
    once in a process.
    """
    return _machine(tuple(uuids))


@functools.cache
def _machine(uuids: tuple[str, ...]) -> Machine | None:
    with _started() as nvml:
        if nvml is None:
            return None
        handles = [nvml.ask("DeviceGetHandleByUUID", uuid) for uuid in uuids]
        facts = [
            GpuFacts(uuid) if handle is None else _facts(nvml, uuid, handle)
            for uuid, handle in zip(uuids, handles, strict=True)
        ]
        return Machine(
            tuple(facts),
            tuple(tuple(_ancestor(nvml, a, b) for b in handles) for a in handles),
            tuple(tuple(_is_peer(nvml, a, b) for b in handles) for a in handles),
            nvml.ask("SystemGetDriverVersion"),
        )


def _facts(nvml: _Nvml, uuid: str, handle: Any) -> GpuFacts:
    pci = nvml.ask("DeviceGetPciInfo", handle)
    bus_id = None if pci is None else bus_id_of(pci.busId)
    return GpuFacts(
        uuid=uuid,
        name=nvml.ask("DeviceGetName", handle),
        bus_id=bus_id,
        numa_node=_numa_node(nvml, handle, bus_id),
        pcie_generation=nvml.ask("DeviceGetMaxPcieLinkGeneration", handle),
        pcie_width=nvml.ask("DeviceGetMaxPcieLinkWidth", handle),
        pcie_generation_now=nvml.ask("DeviceGetCurrPcieLinkGeneration", handle),
        pcie_width_now=nvml.ask("DeviceGetCurrPcieLinkWidth", handle),
        **_nvlinks(nvml, handle),
    )


def _nvlinks(nvml: _Nvml, handle: Any) -> dict[str, Any]:
    """The fields of GpuFacts that tell of NVLinks. A GPU without any has none that is up."""
    version, up, switch, direct = None, 0, 0, dict[str, int]()
    for link in range(max(0, nvml.number("NVLINK_MAX_LINKS"))):
        if nvml.ask("DeviceGetNvLinkState", handle, link) != 1:
            continue
        up += 1
        found = NVLINK_GENERATIONS.get(nvml.ask("DeviceGetNvLinkVersion", handle, link))
        version = found if version is None else version
        kind = nvml.ask("DeviceGetNvLinkRemoteDeviceType", handle, link)
        if kind == nvml.number("NVLINK_DEVICE_TYPE_SWITCH"):
            switch += 1
            continue
        pci = nvml.ask("DeviceGetNvLinkRemotePciInfo", handle, link)
        if kind == nvml.number("NVLINK_DEVICE_TYPE_GPU") and pci is not None:
            far_end = bus_id_of(pci.busId)
            direct[far_end] = direct.get(far_end, 0) + 1
    links = tuple(sorted(direct.items()))
    return {
        "nvlink_version": version,
        "nvlinks": up,
        "switch_links": switch,
        "direct_links": links,
    }


def _numa_node(nvml: _Nvml, handle: Any, bus_id: str | None) -> int | None:
    """The node of the host's memory that is near. What NVML calls the node of a GPU is another
    thing: that of GPUs whose own memory is a node.
    """
    scope = max(0, nvml.number("AFFINITY_SCOPE_NODE"))
    words = nvml.ask("DeviceGetMemoryAffinity", handle, NODE_SET_WORDS, scope)
    bits = sum(int(word) << (64 * i) for i, word in enumerate(words or ()))
    if bits.bit_count() == 1:
        return bits.bit_length() - 1
    if bus_id is None:
        return None
    try:  # the kernel writes domains with four digits
        node = int((PCI_DEVICES / bus_id[4:].lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _ancestor(nvml: _Nvml, a: Any, b: Any) -> str | None:
    if a is None or b is None or a is b:
        return None
    return LEVELS.get(nvml.ask("DeviceGetTopologyCommonAncestor", a, b))


def _is_peer(nvml: _Nvml, a: Any, b: Any) -> bool | None:
    if a is None or b is None or a is b:
        return None
    # Some versions of the binding hold the first of these in a tuple.
    reads = getattr(nvml.binding, "NVML_P2P_CAPS_INDEX_READ", 0)
    writes = getattr(nvml.binding, "NVML_P2P_CAPS_INDEX_WRITE", 1)
    found = [
        nvml.ask("DeviceGetP2PStatus", a, b, each[0] if isinstance(each, tuple) else each)
        for each in (reads, writes)
    ]
    return None if None in found else found == [0, 0]
