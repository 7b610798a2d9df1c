"""The addresses of this machine's network interfaces, and which of them was asked for.

Knows nothing of ranks or sockets. ``GPUALLREDUCE_INTERFACE`` is a list separated by commas:

- ``10.0.0.0/8`` or ``10.1.2.3``: addresses of a network, or one address;
- ``eth``: interfaces whose names begin with it; ``=eth0``: that interface only;
- ``^docker,lo``: all interfaces but those whose names begin with these.

The first entry that matches decides; in it IPv4 comes before IPv6.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from gpuallreduce.errors import InvalidArgument

__all__ = ["INTERFACE", "Interface", "chosen", "interfaces"]

INTERFACE = "GPUALLREDUCE_INTERFACE"
_IP_BYTES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}  # offset and length in sockaddr


@dataclass(frozen=True)
class Interface:
    """One address of a network interface; an interface with several is there several times."""

    name: str
    address: str


class _Ifaddrs(ctypes.Structure):
    """The head of C's ``struct ifaddrs``; what follows is not needed."""


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interfaces() -> list[Interface]:
    """All IP addresses of this machine (link-local ones of IPv6, which need a zone, left out).

    Raises:
        OSError: the system does not tell.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    found = []
    try:
        entry = head
        while entry:
            address = _text(entry.contents.address)
            if address is not None:
                found.append(Interface(entry.contents.name.decode(), address))
            entry = entry.contents.next
    finally:
        libc.freeifaddrs(head)
    return found


def _text(sockaddr: int | None) -> str | None:
    if not sockaddr:
        return None
    family = ctypes.c_ushort.from_address(sockaddr).value
    if family not in _IP_BYTES:
        return None
    offset, length = _IP_BYTES[socket.AddressFamily(family)]
    address = ipaddress.ip_address(ctypes.string_at(sockaddr + offset, length))
    return None if address.version == 6 and address.is_link_local else str(address)


def chosen(wanted: str, available: Sequence[Interface]) -> str:
    """The address that a text like ``eth0`` or ``10.0.0.0/8`` asks for.

    Raises:
        InvalidArgument: none matches; lists those that there are.
    """
    excluding = wanted.startswith("^")
    entries = [entry.strip() for entry in wanted.removeprefix("^").split(",") if entry.strip()]
    matches: list[Interface] = []
    if excluding:
        matches = [one for one in available if not any(_matches(e, one) for e in entries)]
    else:
        for entry in entries:
            matches = matches or [one for one in available if _matches(entry, one)]
    if not matches:
        there = ", ".join(f"{one.name} {one.address}" for one in available) or "none"
        raise InvalidArgument(
            f"{INTERFACE}={wanted} matches no address of this machine; there are: {there}. Give "
            "the name of an interface (eth0), or a network (10.0.0.0/8)"
        )
    return min(matches, key=lambda one: ipaddress.ip_address(one.address).version).address


def _matches(entry: str, one: Interface) -> bool:
    try:
        network = ipaddress.ip_network(entry, strict=False)
    except ValueError:
        if entry.startswith("="):
            return one.name == entry[1:]
        return one.name.startswith(entry)
    address = ipaddress.ip_address(one.address)
    return address.version == network.version and address in network
