"""Two nodes on one machine: network namespaces joined by a link of a given rate. Needs root.

Knows nothing of what runs on them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from gpuallreduce.errors import NotSupported

__all__ = ["ADDRESSES", "NETWORK", "inside", "remote_shell", "two_nodes"]

NETWORK = "10.77.0.0/24"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# Packets wait for the link and are not dropped before they have waited this long.
SHAPE = ("burst", "256k", "latency", "50ms")


def _name(node: int) -> str:
    return f"gar{os.getpid()}n{node}"


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotSupported(
            f"`{' '.join(command)}` failed: {done.stderr.strip()}; network namespaces take root "
            "and iproute2"
        )


@contextlib.contextmanager
def two_nodes(rate: str, congestion: str) -> Iterator[None]:
    """Makes the nodes, and removes them at the end.

    Args:
        rate: of the link in each direction, as tc writes it: ``1gbit``.
        congestion: TCP's congestion control.

    Raises:
        NotSupported: not root, or a tool is missing.
    """
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            raise NotSupported(f"{tool} is needed and not there: apt install iproute2 util-linux")
    names = [_name(node) for node in (0, 1)]
    with contextlib.ExitStack() as stack:
        for name in names:
            _do("ip", "netns", "add", name)
            stack.callback(_do, "ip", "netns", "del", name)
        end = ["type", "veth", "peer", "name", "link1", "netns", names[1]]
        _do("ip", "link", "add", "link0", "netns", names[0], *end)
        for node, name in enumerate(names):
            at = ("ip", "-n", name)
            _do(*at, "link", "set", "lo", "up")
            _do(*at, "addr", "add", f"{ADDRESSES[node]}/24", "dev", f"link{node}")
            _do(*at, "link", "set", f"link{node}", "up")
            route = [NETWORK, "dev", f"link{node}", "proto", "kernel", "scope", "link"]
            _do(*at, "route", "change", *route, "src", ADDRESSES[node], "congctl", congestion)
            root = ["tc", "qdisc", "add", "dev", f"link{node}", "root"]
            _do("ip", "netns", "exec", name, *root, "tbf", "rate", rate, *SHAPE)
        yield


def inside(node: int, *command: str) -> list[str]:
    """A command that runs another one on a node, under a host name of its own."""
    name = _name(node)
    script = f'hostname {name} && exec "$@"'
    return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", script, "sh", *command]


def remote_shell(folder: Path) -> Path:
    """A program that takes the place of ssh for the second node: ADDRESS COMMAND..."""
    name = _name(1)
    path = folder / "remote-shell"
    path.write_text(
        f'#!/bin/sh\nshift\nexec ip netns exec {name} unshare --uts sh -c "hostname {name}; $*"\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path
