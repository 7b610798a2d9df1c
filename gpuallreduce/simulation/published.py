"""Published measurements of all-reduce, each with its source, and what the model says of it.

Knows nothing of the command line. The figures are others': read, not repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuallreduce.simulation.machine import PRESETS, Machine
from gpuallreduce.simulation.model import estimate
from gpuallreduce.types import DTYPES

__all__ = ["MEASURED", "Measured"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NCCL = "https://github.com/NVIDIA/nccl/issues/"
NCCL_TESTS = "https://github.com/NVIDIA/nccl-tests/issues/"
VLLM = "https://github.com/vllm-project/vllm/pull/24111"
RTX6K = "https://github.com/voipmonitor/rtx6kpro/blob/master/hardware/pcie-bandwidth.md"

UNITS = {"busbw": "GB/s", "time": "us", "switch": "KiB"}


@dataclass(frozen=True)
class Measured:
    """One figure.

    Attributes:
        what: for people.
        machine: on which preset, changed as the source says.
        algorithm, order: what comes nearest to what ran.
        nbytes: of one rank's array; where the source gives the peak only, a size that reaches it.
        unit: ``busbw`` (GB/s), ``time`` (us), or ``switch`` (the size in KiB from which two_shot is
            faster than one_shot).
        low, high: the figure, or its range.
        source: address.
        within: the model's error is at most this many percent; recorded, and held by a test.
        note: what the model does not have and the measurement had, if anything.
    """

    what: str
    machine: Machine
    algorithm: str
    order: str
    nbytes: int
    unit: str
    low: float
    high: float
    source: str
    within: float
    note: str = ""

    def simulated(self) -> float:
        """What the model says, in the same unit."""
        if self.unit == "switch":
            return self._switch_bytes() / KIB
        found = estimate(self.machine, self.algorithm, self.order, self.nbytes)
        return found.busbw_gbps if self.unit == "busbw" else found.time_us

    def error_percent(self, simulated: float) -> float:
        """0 inside the range, else how far outside: of its nearer end."""
        near = min(max(simulated, self.low), self.high)
        return 100 * (simulated / near - 1)

    def _switch_bytes(self) -> int:
        """By steps of an eighth of an octave."""
        for step in range(8 * 24):
            nbytes = round(KIB * 2 ** (step / 8)) // 4 * 4
            times = [
                estimate(self.machine, name, "rank", nbytes, dtype=DTYPES["float32"]).time_us
                for name in ("one_shot", "two_shot")
            ]
            if times[1] < times[0]:
                return nbytes
        return 1 << 34


A100, H100, B200 = (PRESETS[name] for name in ("dgx-a100", "dgx-h100", "dgx-b200"))
NVL72 = PRESETS["gb200-nvl72"]
H100x6 = replace(H100, gpus=6, nics=1)
PRO6000 = replace(PRESETS["pcie-one-switch"], link_gbps=44.1, memory_gbps=1500.0)
PRO6000x2 = replace(PRO6000, switches=2, uplink_gbps=44.1)
SHARP = "NVLink SHARP: switches reduce, which the model does not have"


def _many(
    what: str,
    machine: Machine,
    algorithm: str,
    unit: str,
    source: str,
    *rows: tuple[int, float, float],
) -> list[Measured]:
    return [
        Measured(what, machine, algorithm, "rank", nbytes, unit, value, value, source, within)
        for nbytes, value, within in rows
    ]


MEASURED: tuple[Measured, ...] = (
    Measured(
        "8 x A100, one node, NCCL",
        A100,
        "nccl_ring",
        "any",
        4 * GIB,
        "busbw",
        232.5,
        232.5,
        NCCL_TESTS + "175",
        4,
    ),
    Measured(
        "2 x A100 joined by 12 NVLinks, NCCL",
        replace(A100, gpus=2, nics=1),
        "nccl_ring",
        "any",
        8 * GIB,
        "busbw",
        208,
        208,
        NCCL_TESTS + "178",
        17,
    ),
    Measured(
        "8 x H100, one node, NCCL ring",
        H100,
        "nccl_ring",
        "any",
        4 * GIB,
        "busbw",
        365,
        370,
        NCCL + "1455",
        2,
    ),
    Measured(
        "8 x B300, one node, NCCL without SHARP",
        B200,
        "nccl_ring",
        "any",
        8 * GIB,
        "busbw",
        695,
        695,
        NCCL + "2140",
        5,
    ),
    Measured(
        "2 nodes DGX A100, 8 x 200 Gb/s, NCCL",
        replace(A100, nodes=2),
        "nccl_ring",
        "any",
        8 * GIB,
        "busbw",
        192,
        192,
        NCCL + "812",
        2,
    ),
    Measured(
        "2 nodes of 8 x A100, 4 x 200 Gb/s, NCCL",
        replace(A100, nodes=2, nics=4),
        "nccl_ring",
        "any",
        4 * GIB,
        "busbw",
        86,
        86,
        NCCL + "1048",
        13,
    ),
    Measured(
        "4 nodes of 8 x H100, 8 x 400 Gb/s RoCE, NCCL",
        replace(H100, nodes=4),
        "nccl_ring",
        "any",
        8 * GIB,
        "busbw",
        320,
        320,
        NCCL + "1221",
        21,
        "RoCE; one node of theirs reaches 330",
    ),
    Measured(
        "248 nodes of 8 x H200, 512 MiB, NCCL",
        replace(PRESETS["dgx-h200"], nodes=248),
        "hierarchical",
        "any",
        512 * MIB,
        "busbw",
        350,
        350,
        NCCL_TESTS + "283",
        88,
        "NCCL's trees take 2 log2(nodes) steps across nodes, a ring 2 (nodes - 1) for each chunk",
    ),
    Measured(
        "3 racks, 4 x GB200 of each, InfiniBand only, NCCL ring",
        replace(B200, nodes=3, gpus=4, nics=4),
        "nccl_ring",
        "any",
        16 * GIB,
        "busbw",
        196.7,
        196.9,
        NCCL + "1801",
        4,
    ),
    Measured(
        "3 racks, 8 x GB200 of each, InfiniBand only, NCCL ring",
        replace(B200, nodes=3),
        "nccl_ring",
        "any",
        16 * GIB,
        "busbw",
        393.6,
        393.7,
        NCCL + "1801",
        4,
    ),
    Measured(
        "GB200 NVL72, 72 GPUs, NCCL",
        NVL72,
        "nccl_ring",
        "any",
        8 * GIB,
        "busbw",
        834.6,
        846.8,
        "https://github.com/coreweave/nccl-tests/pull/43",
        16,
        SHARP,
    ),
    Measured(
        "8 x H100, one node, NCCL",
        H100,
        "nccl_ring",
        "any",
        4 * GIB,
        "busbw",
        475,
        480,
        NCCL + "1455",
        24,
        SHARP,
    ),
    Measured(
        "8 x RTX PRO 6000 on PCIe 5.0 switches, NCCL",
        PRO6000,
        "nccl_ring",
        "any",
        2 * GIB,
        "busbw",
        41.1,
        41.1,
        RTX6K,
        9,
        "three switches under one processor",
    ),
    Measured(
        "8 x H100, one node, NCCL called from Python, 1 KB",
        H100,
        "nccl_ring",
        "any",
        KIB,
        "time",
        19.5,
        19.5,
        "https://github.com/ByteDance-Seed/Triton-distributed/issues/57",
        80,
        "NCCL sends flags with data (LL) or takes a tree",
    ),
    *_many(
        "2 x H100, vLLM's one-stage kernel",
        replace(H100, gpus=2, nics=1),
        "one_shot",
        "time",
        VLLM,
        (512 * KIB, 7, 10),
    ),
    *_many(
        "6 x H100, vLLM's one-stage kernel",
        H100x6,
        "one_shot",
        "time",
        VLLM,
        (512 * KIB, 13, 10),
        (1 * MIB, 21, 10),
        (2 * MIB, 38, 10),
        (4 * MIB, 70, 10),
    ),
    *_many(
        "6 x H100, vLLM's two-stage kernel",
        H100x6,
        "two_shot",
        "time",
        VLLM,
        (512 * KIB, 15, 34),
        (1 * MIB, 17, 27),
        (2 * MIB, 26, 32),
        (4 * MIB, 37, 25),
    ),
    *_many(
        "8 x RTX PRO 6000 on PCIe 5.0 switches, one-shot kernel",
        PRO6000x2,
        "one_shot",
        "time",
        RTX6K,
        (1 * KIB, 7.5, 25),
        (32 * KIB, 16.5, 10),
        (256 * KIB, 73.6, 43),
    ),
    Measured(
        "8 GPUs on NVLink: one-shot until",
        H100,
        "two_shot",
        "rank",
        0,
        "switch",
        128,
        256,
        "https://github.com/vllm-project/vllm/blob/main/csrc/custom_all_reduce.cuh",
        0,
    ),
    Measured(
        "4 GPUs on NVLink: one-shot until",
        replace(H100, gpus=4, nics=1),
        "two_shot",
        "rank",
        0,
        "switch",
        384,
        512,
        "https://github.com/vllm-project/vllm/blob/main/csrc/custom_all_reduce.cuh",
        0,
    ),
)
