"""``gpuallreduce info`` on machines with GPUs: what it shows, and that calls then do what it says.

Knows nothing of how GPUs are found. They are emulated ones in processes of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from emulated_gpu.activate import environment
from emulated_gpu.child import run_in_child

LIMIT_S = 120
WITHOUT_NVML = "import sys; sys.modules['pynvml'] = None; "
RUN = "from gpuallreduce.cli import main; sys.exit(main(sys.argv[1:]))"
SIZES = (1 << 12, 1 << 20)


def info(*arguments: str, code: str = "", **settings: Any) -> str:
    """What the command prints in a process on emulated GPUs."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}{RUN}", "info", *arguments],
        env=environment(**settings),
        capture_output=True,
        cwd="/",
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def found(*arguments: str, **settings: Any) -> dict[str, Any]:
    return json.loads(info("--json", *arguments, **settings))["cuda"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, where no verdict of a probe lies yet."""
    monkeypatch.setenv("GPUALLREDUCE_CACHE", str(tmp_path))
    return tmp_path


# ---- it says what calls do ----------------------------------------------------------------------


def check_calls(said: dict[str, Any], sizes: list[int]) -> None:
    import cupy
    import numpy as np

    import gpuallreduce as gar

    nranks = len(said["devices"])
    with gar.Communicator(said["devices"], timeout=60) as comm:
        topology = comm.topology
        assert (topology.path, topology.link_gbps) == (said["path"], said["link_gbps"])
        assert topology.max_channels == said["max_channels"]
        for nbytes in sizes:
            xs = []
            for rank in range(nranks):
                with cupy.cuda.Device(rank):
                    values = np.arange(nbytes // 4, dtype=np.float32) % 97 + rank
                    xs.append(cupy.asarray(values))
            plan = comm.plan(xs)
            assert plan.transport == said["transport"]
            (row,) = (
                row
                for row in said["choices"]
                if (row["bytes"], row["arrays"], row["in_place"]) == (nbytes, "plain", True)
            )
            assert row["algorithm"] == plan.config.algorithm
            assert row["access"] == plan.config.access
            assert row["nchannels"] == plan.config.nchannels
            assert row["chunk_bytes"] == plan.config.chunk_count * 4
            assert row["costs_us"] == plan.costs
            comm.allreduce(xs)
            comm.synchronize()
            total = np.arange(nbytes // 4) % 97 * nranks + sum(range(nranks))
            assert all((x.get() == total).all() for x in xs)


EXPECTED = {
    "nvswitch8": ("nvlink", "peer access of one process"),
    "pcie4": ("pcie", "peer access of one process"),
    "islands2": ("host memory", "pinned host memory (cuda:0 cannot access cuda:2)"),
    "partial": ("host memory", "pinned host memory (cuda:0 cannot access cuda:3)"),
}


@pytest.mark.parametrize("topology", EXPECTED)
def test_calls_on_each_machine_do_what_info_says(topology):
    said = found("--probe", topology=topology)["communicator"]
    assert (said["path"], said["transport"]) == EXPECTED[topology]
    assert said["error"] is None
    run_in_child(check_calls, {"said": said, "sizes": SIZES}, topology=topology)


@pytest.mark.parametrize("visible", ["0", "1,0"])
def test_calls_on_some_gpus_of_a_machine_do_what_info_says(visible):
    settings = {"topology": "islands2", "visible": visible}
    said = found("--probe", **settings)["communicator"]
    one = visible == "0"
    assert said["devices"] == (["cuda:0"] * 2 if one else ["cuda:0", "cuda:1"])
    assert said["path"] == ("one device" if one else "nvlink")
    if not one:
        run_in_child(check_calls, {"said": said, "sizes": SIZES[:1]}, **settings)


# ---- what it shows ------------------------------------------------------------------------------


def test_the_matrix_has_kind_and_rate_of_each_pair(cache):
    cuda = found(topology="islands2")
    assert cuda["driver"] == "580.00.00"
    assert [gpu["links"]["numa_node"] for gpu in cuda["gpus"]] == [0, 0, 1, 1]
    cells = [[(link["kind"], link["peer_access"]) for link in row] for row in cuda["matrix"]]
    far, near, same = ("SYS", False), ("NV12", True), ("X", True)
    assert cells == [
        [same, near, far, far],
        [near, same, far, far],
        [far, far, same, near],
        [far, far, near, same],
    ]
    link = cuda["matrix"][0][1]
    assert (link["gbps"], link["usable_gbps"]) == (300, pytest.approx(240))
    assert cuda["matrix"][0][2]["gbps"] == pytest.approx(31.5, abs=0.1)
    assert {row["arrays"] for row in cuda["communicator"]["choices"]} == {"plain"}


def test_the_text_has_devices_matrix_way_and_choices(cache):
    text = info(topology="islands2")
    lines = text.splitlines()
    assert "devices    host, cuda:0, cuda:1, cuda:2, cuda:3" in lines
    assert "NVLink 3 x 12 to other GPUs, PCIe 4 x16" in text
    row = "cuda:1    NV12 300         X  SYS 32 !  SYS 32 !          0"
    assert row in lines
    for words in (
        "NV12: 12 NVLinks",
        "SYS: PCIe through the link between NUMA nodes",
        "!: CUDA grants no access",
        "host memory, 11 GB/s expected of a GPU to its peers",
        "pinned host memory (cuda:0 cannot access cuda:2)",
        "over 4 CUDA ranks of one process",
        "host ranks, a process each",
    ):
        assert words in text
    assert text.count("256 MiB") >= 2


def test_the_probe_runs_only_when_asked_and_its_verdict_is_kept(cache):
    before = found(topology="pcie4")["communicator"]
    assert before["probe"] is None
    assert before["transport"] == "peer access of one process (not probed yet)"
    assert not list(cache.glob("probe-*.json"))
    probed = found("--probe", topology="pcie4")["communicator"]
    assert probed["probe"]["failures"] == []
    assert len(probed["probe"]["gpus"]) == 4
    after = found(topology="pcie4")["communicator"]
    assert after == probed
    assert "12 pairs, 0 of them with faults" in info(topology="pcie4")


def test_the_probe_shows_who_lies(cache):
    text = info("--probe", topology="pcie4", lying_peers="1-2")
    assert "12 pairs, 2 of them with faults" in text
    assert "cuda:1 on memory of cuda:2: loads are wrong" in text
    assert "cuda:2 on memory of cuda:1: loads are wrong" in text
    assert "path       host memory" in text


def test_a_skipped_probe_is_said(cache, monkeypatch):
    monkeypatch.setenv("GPUALLREDUCE_PROBE", "0")
    said = found(topology="pcie4")["communicator"]
    assert said["transport"].endswith("(not probed, as GPUALLREDUCE_PROBE=0 asks)")
    assert found("--probe", topology="pcie4")["communicator"]["probe"]["failures"] == []


def test_without_nvml_links_are_unknown_and_the_rest_is_shown():
    text = info(code=WITHOUT_NVML, gpus=2)
    assert "NVML is missing" in text
    assert "links unknown" in text
    assert "cuda:0           X         ?          ?" in text
    assert "pcie, 22 GB/s expected" in text


def test_ranks_and_dtype_are_those_asked_for():
    said = found("-g", "3", "-d", "bool", gpus=2)["communicator"]
    assert said["devices"] == ["cuda:0", "cuda:1", "cuda:0"]
    assert "bool over 3 CUDA ranks" in info("-g", "3", "-d", "bool", gpus=2)


# ---- machines without GPUs ----------------------------------------------------------------------


def test_a_driver_without_gpus_is_said():
    cuda = found(visible="")
    assert cuda["gpus"] == []
    assert "sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES" in cuda["error"]


def test_without_a_driver_info_says_so_and_loads_nothing_of_cuda():
    code = (
        "import ctypes, sys\n"
        "real = ctypes.CDLL\n"
        "def missing(name, *rest, **more):\n"
        "    if 'libcuda' in str(name): raise OSError(name)\n"
        "    return real(name, *rest, **more)\n"
        "ctypes.CDLL = missing\n"
        "from gpuallreduce.cli import main\n"
        "assert main(['info']) == 0\n"
        "print([name for name in ('cupy', 'cuda', 'pynvml') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        cwd="/",
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no CUDA devices: there is no NVIDIA driver (libcuda.so.1 is not found)" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_without_cupy_info_says_what_to_install():
    code = "import importlib.util as u; u.find_spec = lambda name: None; "
    cuda = json.loads(info("--json", code=code, gpus=2))["cuda"]
    assert cuda["error"].startswith("CuPy is missing: pip install")
