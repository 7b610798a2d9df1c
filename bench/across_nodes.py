"""All-reduce of 2 nodes x 2 host ranks over a link of 1 Gbit/s, on one machine, as root:

    python bench/across_nodes.py --rounds 7

Knows nothing of how it is measured: see ``across_rank``.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from gpuallreduce.errors import DeviceError, Error

__all__ = ["main"]

RESULTS = Path(__file__).parent / "results"
LIMIT_S = 600
COLUMNS = (
    ("order any", "any"),
    ("between alone", "any_between"),
    ("inside alone", "inside"),
    ("order rank", "rank"),
    ("between alone", "rank_between"),
    ("Open MPI", "mpi"),
    ("one exchange", "exchange"),
)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Makes the nodes, runs the ranks, and brings back what they found.

    Raises:
        NotSupported: the nodes cannot be made here.
        DeviceError: the job failed.
    """
    # By name: a script's folder is no package.
    nodes = import_module("gpuallreduce.bench.namespaces")
    with tempfile.TemporaryDirectory() as scratch, nodes.two_nodes("1gbit", options.congestion):
        found = Path(scratch) / "found.json"
        settings = {
            "GPUALLREDUCE_ADDRESS": f"{nodes.ADDRESSES[0]}:4477",
            "GPUALLREDUCE_SECRET": secrets.token_hex(16),
            "GPUALLREDUCE_NET_GBPS": "0.12",  # the interfaces know nothing of the shaping
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        mca = {
            "plm_rsh_agent": str(nodes.remote_shell(Path(scratch))),
            "pml": "ob1",
            "btl": "tcp,self,vader",
            "btl_tcp_if_include": nodes.NETWORK,
            "oob_tcp_if_include": nodes.NETWORK,
            "mpi_yield_when_idle": "1",  # there may be fewer cores than ranks
        }
        hosts = ",".join(f"{address}:2" for address in nodes.ADDRESSES)
        command = ["mpirun", "-n", "4", "--host", hosts, "--bind-to", "none"]
        for name, value in mca.items():
            command += ["--mca", name, value]
        for name in settings:
            command += ["-x", name]
        command += [sys.executable, "-m", "gpuallreduce.bench.across_rank"]
        command += ["--rounds", str(options.rounds), "--output", str(found), "--mib"]
        command += [f"{mib:g}" for mib in options.mib]
        done = subprocess.run(
            nodes.inside(0, *command),
            env={**os.environ, **settings},
            timeout=LIMIT_S,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0 or not found.exists():
            raise DeviceError(f"mpirun ended with {done.returncode}:\n{done.stderr.strip()}")
        result: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
        return {**result, "mca": {name: mca[name] for name in mca if name != "plm_rsh_agent"}}


def table(document: dict[str, Any]) -> str:
    """Medians in ms, and ratios."""
    names = [name for name, _ in COLUMNS]
    ratios = ["any / larger stage", "rank / larger stage", "Open MPI / any", "Open MPI / rank"]
    lines = ["| MiB | " + " | ".join([*names, *ratios]) + " |"]
    lines.append("|" + "---:|" * (1 + len(names) + len(ratios)))
    for row in document["results"]:
        ms = {name: statistics.median(times) * 1e3 for name, times in row["seconds"].items()}
        cells = [f"{ms[name]:.1f}" for _, name in COLUMNS]
        for order in ("any", "rank"):
            larger = max(ms[f"{order}_between"], ms["inside"])
            cells.append(f"{ms[order] / larger:.2f}")
        cells += [f"{ms['mpi'] / ms[order]:.2f}" for order in ("any", "rank")]
        lines.append(f"| {row['bytes'] / (1 << 20):g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it with command line arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--congestion", default="cubic", help="TCP's congestion control")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    day = time.strftime("%Y-%m-%d")
    try:
        found = run(options)
    except (Error, subprocess.TimeoutExpired) as error:
        print(f"across_nodes: {error}", file=sys.stderr)
        return 1
    document = {
        "version": 1,
        "date": day,
        "cores": os.cpu_count(),
        "link": "1gbit",
        "congestion": options.congestion,
        "rounds": options.rounds,
        **found,
    }
    output = options.output or RESULTS / f"across-2x2-1gbit-{day}.json"
    output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
