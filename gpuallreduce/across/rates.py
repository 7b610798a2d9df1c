"""What the ways between and inside nodes carry: read from the machine or set, and agreed on by all
ranks.

Knows nothing of what is decided by it.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpuallreduce.across.pace import SHARD_CHUNK_BYTES, Ways
from gpuallreduce.algorithms import base
from gpuallreduce.bootstrap import address as addresses
from gpuallreduce.bootstrap.environment import ADDRESS
from gpuallreduce.bootstrap.interfaces import INTERFACE, Interface, chosen, interfaces
from gpuallreduce.bootstrap.nodes import Nodes
from gpuallreduce.errors import Error, InvalidArgument
from gpuallreduce.topology import Topology

__all__ = ["NET_GBPS", "Network", "agreed", "network", "slowest", "ways_of"]

NET_GBPS = "GPUALLREDUCE_NET_GBPS"
SYSTEM = Path("/sys/class")
USABLE = 0.95  # of a port's rate, once packets have their headers
DEFAULT_GBPS = 1.25 * USABLE  # 10 Gbit/s Ethernet

# Host ranks with MPI over TCP: fitted to 2 x 2 ranks on 2 cores at 1 and 10 Gbit/s, arrays of 256
# KiB to 32 MiB, chunks of 32 KiB to 1 MiB of a shard. Engines on GPUs: as in simulation.machine.
HOST_NET_US, HOST_MESSAGE_US, HOST_LAUNCH_US = 150.0, 50.0, 100.0
HOST_MEMORY_GBPS = 12.0  # of a core, chunks out of other cores' caches
HOST_BUFFER_BYTES = 16 << 20
HOST_MESSAGE_BYTES, HOST_MESSAGE_S = 64 << 10, 1e-3  # see _longest_message
GPU_NET_US, GPU_MESSAGE_US = 10.0, 5.0
GPU_MEMORY_GBPS = 1700.0  # of the slowest that has NVLink; others are not bound by it either
GPU_BUFFER_BYTES = 64 << 20


@dataclass(frozen=True)
class Network:
    """What a node's network carries.

    Attributes:
        gbps: of the node, one direction, in GB/s; None: unknown.
        cards: what it is the sum of.
        source: where that is from.
    """

    gbps: float | None
    source: str
    cards: int = 1


def network(environ: Mapping[str, str], *, system: Path = SYSTEM) -> Network:
    """This node's: ``GPUALLREDUCE_NET_GBPS``, else its RDMA ports together, else the interface
    between nodes.

    Raises:
        InvalidArgument: the variable is no rate.
    """
    text = environ.get(NET_GBPS)
    if text:
        return Network(_rate(text), NET_GBPS)
    ports = [rate for rate in map(_port_gbps, sorted(system.glob("infiniband/*/ports/*"))) if rate]
    if ports:
        many = "an RDMA port" if len(ports) == 1 else f"{len(ports)} RDMA ports"
        return Network(sum(ports) * USABLE, many, len(ports))
    name = _interface(environ)
    if name is None:
        return Network(None, "no interface")
    megabits = _number(system / "net" / name / "speed")
    if megabits is None or megabits <= 0:
        return Network(None, f"{name}, whose speed is unknown")
    return Network(megabits / 8e3 * USABLE, f"{name}'s speed")


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise InvalidArgument(
            f"{NET_GBPS}={text!r:.100}: expected what a node sends to others in GB/s, above 0 "
            "(12.5 for 100 Gbit/s); unset it to let it be read from the machine"
        )
    return rate


def _port_gbps(port: Path) -> float | None:
    """Of an RDMA port that is up: its file says ``100 Gb/sec (4X EDR)``."""
    try:
        if "ACTIVE" not in (port / "state").read_text():
            return None
        return float((port / "rate").read_text().split()[0]) / 8
    except (OSError, ValueError, IndexError):
        return None


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # Linux refuses to read the speed of what has none
        return None


def _interface(environ: Mapping[str, str]) -> str | None:
    """The interface between nodes: that which was asked for, else that which leads to where the
    ranks meet, unless this is that machine and they meet at its loopback.
    """
    try:
        there = interfaces()
        asked = environ.get(INTERFACE)
        local = chosen(asked, there) if asked else _towards(environ)
    except (OSError, Error):
        return None
    return _named(local, there)


def _named(local: str | None, there: Sequence[Interface]) -> str | None:
    return next((one.name for one in there if one.address == local and one.name != "lo"), None)


def _towards(environ: Mapping[str, str]) -> str | None:
    """This machine's address on the way to where the ranks meet."""
    meeting = environ.get(ADDRESS)
    host, port = environ.get("MASTER_ADDR"), 1
    if meeting and not addresses.is_unix(meeting):
        parsed = addresses.parse(meeting)
        host, port = str(parsed[0]), int(parsed[1])
    if not host:
        return None
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as way:
            way.connect(where)  # of datagrams: only looks up the route
            return str(way.getsockname()[0])
    return None


def ways_of(topology: Topology, *, nnodes: int, nshards: int, nlocal: int, net: Network) -> Ways:
    """The ways as one rank sees them.

    Args:
        topology: of its node.
        nnodes, nshards, nlocal: see ``Ways``.
        net: of its node.
    """
    net_gbps = DEFAULT_GBPS if net.gbps is None else net.gbps
    gpu = base.on_gpu(topology)
    memory = HOST_MEMORY_GBPS / topology.sharing
    return Ways(
        nnodes=nnodes,
        nshards=nshards,
        nlocal=nlocal,
        net_gbps=net_gbps / nshards,
        card_gbps=net_gbps / min(net.cards, nshards),
        net_us=GPU_NET_US if gpu else HOST_NET_US,
        message_us=GPU_MESSAGE_US if gpu else HOST_MESSAGE_US,
        link_gbps=topology.link_gbps if gpu else memory,
        memory_gbps=GPU_MEMORY_GBPS if gpu else memory,
        hop_us=base.GPU_PHASE_US if gpu else base.HOST_PHASE_US * topology.sharing,
        launch_us=base.GPU_CALL_US - base.GPU_PHASE_US if gpu else HOST_LAUNCH_US,
        messages=not gpu,
        net_through_link=gpu and topology.path != "nvlink",
        least_turns=3 if gpu else 1,
        buffer_bytes=GPU_BUFFER_BYTES if gpu else HOST_BUFFER_BYTES,
        most_shard_bytes=SHARD_CHUNK_BYTES[1] if gpu else _longest_message(net_gbps / nshards),
    )


def _longest_message(gbps: float) -> int:
    """Bytes of a message of host ranks, at most. A long one asks its receiver first, and both its
    question and the answer wait behind the data that are under way: at 1 Gbit/s for two ranks
    shards of 64 KiB took up to 5 % less than those of 128 KiB, and up to 25 % less than longer
    ones.
    """
    return max(HOST_MESSAGE_BYTES, int(gbps * 1e9 * HOST_MESSAGE_S))


def agreed(
    nodes: Nodes, topology: Topology, *, environ: Mapping[str, str] | None = None
) -> tuple[Ways, str]:
    """The ways that all ranks count with, each at its slowest, and a line for people on the
    network; a collective of all ranks.

    Raises:
        InvalidArgument: a rank's variable is no rate; DeviceError on the others.
    """
    failure: Error | None = None
    found = Network(None, "")
    try:
        found = network(os.environ if environ is None else environ)
    except InvalidArgument as error:
        failure = error
    mine = ways_of(
        topology,
        nnodes=len(nodes.sizes),
        nshards=min(nodes.sizes),
        nlocal=max(nodes.sizes),
        net=found,
    )
    payload = {"gbps": found.gbps, "source": found.source, "ways": asdict(mine)}
    parts = [each.payload for each in nodes.everyone.exchange("rates", payload, error=failure)]
    return slowest(parts)


def slowest(parts: Sequence[dict[str, Any]]) -> tuple[Ways, str]:
    """Of all ranks' rates the smallest, of latencies the largest; see ``agreed``. A node whose
    network is unknown is as fast as the others.
    """
    known = [each for each in parts if each["gbps"] is not None]
    fields: dict[str, Any] = {}
    for name in parts[0]["ways"]:
        of = known if known and name in ("net_gbps", "card_gbps") else parts
        values = [each["ways"][name] for each in of]
        fields[name] = max(values) if name.endswith("_us") else min(values)
    if not known:
        said = f"{DEFAULT_GBPS:.3g} GB/s a node assumed: {parts[0]['source']}; set {NET_GBPS}"
        return Ways(**fields), said
    least = min(known, key=lambda each: (each["gbps"], each["source"]))
    return Ways(**fields), f"{least['gbps']:.3g} GB/s a node, from {least['source']}"
