"""What joins GPUs: rates and words of links, what NVML tells of them, and what ranks make of it.

Knows nothing of how NVML is asked. GPUs are emulated ones in processes of their own.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from emulated_gpu.activate import environment
from emulated_gpu.child import run_in_child
from jobs import run_job

from gpuallreduce import links
from gpuallreduce.links import GpuFacts, Machine
from gpuallreduce.topology import PATHS


def gpu(number: int, *, nvlink: int | None = None, up: int = 0, **more: Any) -> GpuFacts:
    pcie = {"pcie_generation": 4, "pcie_width": 16}
    bus_id = f"00000000:{number:02X}:00.0"
    return GpuFacts(
        f"GPU-{number}", bus_id=bus_id, nvlink_version=nvlink, nvlinks=up, **{**pcie, **more}
    )


def switched(count: int, *, nvlink: int = 4, up: int = 18) -> list[GpuFacts]:
    return [gpu(i, nvlink=nvlink, up=up, switch_links=up) for i in range(count)]


def joined(count: int, *, each: int, nvlink: int = 3) -> list[GpuFacts]:
    """Every GPU has so many NVLinks to every other."""
    gpus = []
    for i in range(count):
        to = tuple((f"00000000:{j:02X}:00.0", each) for j in range(count) if j != i)
        gpus.append(gpu(i, nvlink=nvlink, up=each * (count - 1), direct_links=to))
    return gpus


# ---- rates and words ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "count", "raw", "usable"),
    [(3, 12, 300, 240), (4, 18, 450, 370), (5, 18, 900, 720), (1, 4, 80, 64), (2, 6, 150, 120)],
)
def test_nvlink_rates_are_those_of_known_gpus(version, count, raw, usable):
    one = gpu(0, nvlink=version, up=count, switch_links=count)
    assert one.nvlink_gbps is not None
    assert one.nvlink_gbps * count == raw
    assert links.nvlink_usable(one) == pytest.approx(usable)


@pytest.mark.parametrize(
    ("generation", "width", "gbps"),
    [(1, 16, 4.0), (2, 16, 8.0), (3, 16, 15.754), (4, 16, 31.508), (5, 8, 31.508), (6, 16, 121.0)],
)
def test_pcie_rates_count_lanes_and_encoding(generation, width, gbps):
    assert links.pcie_gbps(generation, width) == pytest.approx(gbps, abs=1e-3)


def test_what_is_not_known_gives_no_rate():
    assert links.pcie_gbps(None, 16) is None
    assert links.pcie_gbps(4, None) is None
    assert links.pcie_gbps(99, 16) is None
    bare = [GpuFacts("GPU-a"), GpuFacts("GPU-b")]
    assert links.link_between(*bare) == links.Link("?", None, None)
    assert links.path_of(bare) == "pcie"
    assert [links.sends_gbps(bare, path) for path in PATHS if path != "nvlink"] == [None] * 3
    newer = switched(2, nvlink=99)
    assert links.link_between(*newer).kind == "NV18"
    assert links.sends_gbps(newer, "nvlink") is None


@pytest.mark.parametrize(
    ("one", "other"),
    [("0000:0a:00.0", "00000000:0A:00.0"), ("0001:FF:1F.7", "00000001:ff:1f.7")],
)
def test_a_bus_id_is_one_however_it_is_written(one, other):
    assert links.bus_id_of(one) == links.bus_id_of(other)
    assert links.bus_id_of(one) != links.bus_id_of("0000:0b:00.0")


@pytest.mark.parametrize("ancestor", links.ANCESTORS)
def test_words_are_those_of_nvidia_smi(ancestor):
    by_pcie = (gpu(0), gpu(1))
    machine = Machine(by_pcie, ((None, ancestor), (ancestor, None)), ((None,) * 2,) * 2)
    assert machine.link(0, 1).kind == ancestor
    assert machine.link(0, 1).gbps == pytest.approx(31.508, abs=1e-3)
    assert machine.link(1, 1) == links.Link("X", None, None)
    by_nvlink = tuple(joined(2, each=4))
    machine = Machine(by_nvlink, machine.ancestors, machine.peers)
    assert machine.link(1, 0) == links.Link("NV4", 100.0, pytest.approx(80.0))


def test_the_slower_end_sets_the_rate_of_a_link():
    fast, slow = gpu(0, pcie_generation=5), gpu(1, pcie_width=8)
    assert links.link_between(fast, slow).gbps == links.pcie_gbps(4, 8)
    few, many = gpu(0, nvlink=4, up=4, switch_links=4), switched(1)[0]
    assert links.link_between(few, many).kind == "NV4"


# ---- what a communicator makes of them ----------------------------------------------------------


def test_all_gpus_on_a_switch_send_at_their_full_rate():
    gpus = switched(8)
    assert links.path_of(gpus) == "nvlink"
    assert links.sends_gbps(gpus, "nvlink") == pytest.approx(370)
    assert links.sends_gbps(gpus[:2], "nvlink") == pytest.approx(370)


def test_gpus_joined_directly_send_over_the_links_to_their_peers_only():
    gpus = joined(4, each=4)
    assert links.path_of(gpus) == "nvlink"
    assert links.sends_gbps(gpus, "nvlink") == pytest.approx(12 * 25 * 0.8)
    assert links.sends_gbps(gpus[:2], "nvlink") == pytest.approx(4 * 25 * 0.8)


def test_the_weakest_gpu_sets_the_rate():
    gpus = [*switched(3), gpu(3, nvlink=4, up=9, switch_links=9)]
    assert links.sends_gbps(gpus, "nvlink") == pytest.approx(185)
    slow = [gpu(0), gpu(1, pcie_generation=3), gpu(2)]
    assert links.sends_gbps(slow, "pcie") == links.pcie_usable(slow[1])
    assert links.sends_gbps(slow, "host memory") == pytest.approx(links.pcie_usable(slow[1]) / 2)
    assert links.sends_gbps([slow[0], GpuFacts("GPU-x")], "pcie") is None


def test_one_pair_without_nvlink_puts_all_on_pcie():
    pairs = [*joined(2, each=12), *switched(1)]
    assert links.path_of(pairs) == "pcie"


def test_ranks_that_share_gpus_count_them_once():
    one, two = switched(2)
    assert links.path_of([one, one, one]) == "one device"
    assert links.path_of([one, two, one, two]) == "nvlink"
    assert links.sends_gbps([one, two, one], "nvlink") == pytest.approx(370)
    assert links.sends_gbps([one, one], "one device") is None


def test_facts_survive_json():
    for facts in (*joined(3, each=2), *switched(1), GpuFacts("GPU-x")):
        assert links.from_plain(json.loads(json.dumps(links.to_plain(facts)))) == facts


# ---- NVML ---------------------------------------------------------------------------------------

MACHINES = {
    "nvswitch8": {
        "kinds": [["X" if a == b else "NV18" for b in range(8)] for a in range(8)],
        "nodes": [0, 0, 0, 0, 1, 1, 1, 1],
        "pcie": [5, 16],
        "path": "nvlink",
        "gbps": 370,
    },
    "pcie4": {
        "kinds": [["X" if a == b else "PIX" for b in range(4)] for a in range(4)],
        "nodes": [0, 0, 0, 0],
        "pcie": [4, 16],
        "path": "pcie",
        "gbps": 22.055,
    },
    "islands2": {
        "kinds": [
            ["X", "NV12", "SYS", "SYS"],
            ["NV12", "X", "SYS", "SYS"],
            ["SYS", "SYS", "X", "NV12"],
            ["SYS", "SYS", "NV12", "X"],
        ],
        "nodes": [0, 0, 1, 1],
        "pcie": [4, 16],
        "path": "host memory",
        "gbps": 11.028,
    },
    "partial": {
        "kinds": [["X" if a == b else "PHB" for b in range(4)] for a in range(4)],
        "nodes": [0, 0, 0, 0],
        "pcie": [4, 16],
        "path": "host memory",
        "gbps": 11.028,
    },
}


def check_machine(expected: dict[str, Any]) -> None:
    from gpuallreduce.devices import nvml
    from gpuallreduce.devices.cuda_runtime import cupy_module, device_count, gpu_of
    from gpuallreduce.placement_cuda import local_ranks

    gpus = [gpu_of(number) for number in range(device_count())]
    machine = nvml.machine([each.uuid for each in gpus])
    assert machine is not None
    count = range(len(gpus))
    assert [[machine.link(a, b).kind for b in count] for a in count] == expected["kinds"]
    assert [each.numa_node for each in machine.gpus] == expected["nodes"]
    for each, facts in zip(gpus, machine.gpus, strict=True):
        assert (facts.uuid, facts.name) == (each.uuid, each.name)
        assert facts.bus_id == links.bus_id_of(each.bus_id)
        best, now = expected["pcie"], [facts.pcie_generation_now, facts.pcie_width_now]
        assert [facts.pcie_generation, facts.pcie_width] == now == best
    can_access = cupy_module().cuda.runtime.deviceCanAccessPeer
    for a in count:
        for b in count:
            assert machine.peers[a][b] == (None if a == b else bool(can_access(a, b)))
    topology = local_ranks([f"cuda:{number}" for number in count]).topology
    assert topology.path == expected["path"]
    assert topology.link_gbps == pytest.approx(expected["gbps"], abs=1e-3)


@pytest.mark.parametrize("name", MACHINES)
def test_nvml_tells_each_machine_as_it_is_and_the_tuner_hears_of_it(name):
    run_in_child(check_machine, {"expected": MACHINES[name]}, topology=name)


def check_order() -> None:
    from gpuallreduce.devices import nvml
    from gpuallreduce.devices.cuda_runtime import gpu_of
    from gpuallreduce.placement_cuda import local_ranks

    machine = nvml.machine([gpu_of(number).uuid for number in range(3)])
    assert machine is not None
    assert machine.link(0, 1).kind == "SYS"
    assert machine.link(0, 2).kind == "NV12"
    assert [facts.numa_node for facts in machine.gpus] == [1, 0, 1]
    pair = local_ranks(["cuda:0", "cuda:2"]).topology
    assert (pair.path, pair.link_gbps) == ("nvlink", pytest.approx(240))
    assert local_ranks(["cuda:0", "cuda:1"]).topology.path == "host memory"
    assert local_ranks(["cuda:1", "cuda:1"]).topology.path == "one device"


def test_gpus_are_known_by_uuid_however_they_are_numbered():
    run_in_child(check_order, {}, topology="islands2", visible="3,0,2")


QUESTIONS = {
    "nvmlDeviceGetPciInfo": {"bus_id"},
    "nvmlDeviceGetName": {"name"},
    "nvmlDeviceGetMemoryAffinity": {"numa_node"},
    "nvmlDeviceGetMaxPcieLinkGeneration": {"pcie_generation"},
    "nvmlDeviceGetMaxPcieLinkWidth": {"pcie_width"},
    "nvmlDeviceGetCurrPcieLinkGeneration": {"pcie_generation_now"},
    "nvmlDeviceGetCurrPcieLinkWidth": {"pcie_width_now"},
    "nvmlDeviceGetNvLinkState": {"nvlinks", "nvlink_version", "direct_links"},
    "nvmlDeviceGetNvLinkVersion": {"nvlink_version"},
    "nvmlDeviceGetNvLinkRemoteDeviceType": {"direct_links"},
    "nvmlDeviceGetNvLinkRemotePciInfo": {"direct_links"},
    "nvmlDeviceGetTopologyCommonAncestor": {"ancestors"},
    "nvmlDeviceGetP2PStatus": {"peers"},
    "nvmlSystemGetDriverVersion": {"driver"},
    "nvmlDeviceGetHandleByUUID": {*GpuFacts.__dataclass_fields__, "ancestors", "peers"}
    - {"uuid", "switch_links"},
}


def check_refusals(questions: dict[str, list[str]]) -> None:
    from dataclasses import asdict
    from unittest import mock

    import pynvml

    from gpuallreduce.devices import nvml
    from gpuallreduce.devices.cuda_runtime import gpu_of

    uuids = [gpu_of(number).uuid for number in range(2)]

    def ask() -> dict[str, Any]:
        nvml._machine.cache_clear()
        machine = nvml.machine(uuids)
        assert machine is not None
        of_all = {key: getattr(machine, key) for key in ("ancestors", "peers", "driver")}
        return {**asdict(machine.gpus[0]), **of_all}

    whole = ask()
    codes = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    for name, missing in questions.items():
        for code in codes:
            with mock.patch.object(pynvml, name, side_effect=pynvml.NVMLError(code)):
                refused = ask()
            assert {key for key in whole if refused[key] != whole[key]} == set(missing), name
        with mock.patch.object(pynvml, name, None):  # as in a binding that is older
            assert ask() == refused, name
    assert ask() == whole


def test_each_question_may_be_refused_alone():
    questions = {name: sorted(missing) for name, missing in QUESTIONS.items()}
    run_in_child(check_refusals, {"questions": questions}, topology="islands2")


def check_without_nvml() -> None:
    import sys

    sys.modules["pynvml"] = None  # type: ignore[assignment]

    import cupy
    import numpy as np

    import gpuallreduce as gar
    from gpuallreduce.devices import nvml

    assert nvml.machine(["GPU-any"]) is None
    assert nvml.driver_version() is None
    with gar.Communicator(["cuda:0", "cuda:1"], timeout=30) as comm:
        assert (comm.topology.path, comm.topology.link_gbps) == ("pcie", PATHS["pcie"])
        xs = []
        for number in range(2):
            with cupy.cuda.Device(number):
                xs.append(cupy.asarray(np.full(100, number + 1, np.float32)))
        comm.allreduce(xs)
        comm.synchronize()
        assert all((x.get() == 3).all() for x in xs)


def test_without_nvml_everything_goes_on():
    run_in_child(check_without_nvml, {}, gpus=2)


# ---- ranks agree --------------------------------------------------------------------------------

BODY = """
rank = int(os.environ["GPUALLREDUCE_RANK"])
os.environ["CUDA_VISIBLE_DEVICES"] = str(3 - rank)
if rank == int(os.environ.get("BLIND_RANK", "-1")):
    sys.modules["pynvml"] = None
comm = gar.init(device="cuda", timeout=30)
topology = comm.topology
report([topology.path, topology.link_gbps, topology.max_channels])
comm.close()
"""


@pytest.mark.parametrize(
    ("blind", "path", "gbps"), [("-1", "nvlink", 240.0), ("1", "pcie", PATHS["pcie"])]
)
def test_ranks_that_see_different_gpus_make_the_same_of_them(blind, path, gbps):
    """Each process sees one GPU and calls it cuda:0; one may lack NVML."""
    variables = {**environment(topology="islands2"), "BLIND_RANK": blind}
    found = [rank.reports[0] for rank in run_job(2, BODY, **variables)]
    assert found[0] == found[1]
    assert found[0][0] == path
    assert found[0][1] == pytest.approx(gbps)
