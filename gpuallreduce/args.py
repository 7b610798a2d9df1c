"""The structs that the host and a kernel share: a mirror of ``kernels/args.h`` and
``kernels/host.h``.

Knows only their layout; ``tests/test_args.py`` compares every field with the compiler's.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = [
    "ABORTED",
    "CALL",
    "CLOSED",
    "CREDIT",
    "LOST",
    "MISMATCH",
    "READY",
    "TABLE_RANKS",
    "TIMED_OUT",
    "GarArgs",
    "GarChaseArgs",
    "GarCopyArgs",
    "GarDeviceArgs",
    "GarHeader",
    "GarHoldArgs",
    "GarLaunch",
    "GarNodesArgs",
    "GarPatternArgs",
    "GarProbeArgs",
    "GarProbeResult",
    "GarReport",
    "GarStridedArgs",
    "GarWrongWord",
    "MAX_AXES",
    "NODES_BEGUN",
    "NODES_DIFFERS",
    "NODES_ENDED",
    "NODES_FOLDED",
    "NODES_GATHERED",
    "NODES_HALTED",
    "NODES_MEETING",
    "NODES_MET",
    "PROBE_IDLE",
    "PROBE_LATE",
    "PROBE_NO_STORE",
    "PROBE_OK",
    "PROBE_PEER_ENDED",
    "PROBE_WRONG_LOAD",
    "PROBE_WRONG_STORE",
    "set_table",
]

# GarReport.code and GarReport.word, as in primitives.cuh.
TABLE_RANKS = 72  # kTableRanks of args.h
MAX_AXES = 8

TIMED_OUT, MISMATCH, ABORTED, CLOSED, LOST = 1, 2, 3, 4, 5
CALL, READY, CREDIT = 0, 1, 2
# GarProbeResult.code.
PROBE_IDLE, PROBE_OK, PROBE_LATE = 0, 1, 2
PROBE_NO_STORE, PROBE_WRONG_STORE, PROBE_WRONG_LOAD, PROBE_PEER_ENDED = 3, 4, 5, 6
# Words of GarNodesArgs.
NODES_BEGUN, NODES_MET, NODES_FOLDED, NODES_GATHERED, NODES_ENDED, NODES_DIFFERS = range(6)
NODES_HALTED, NODES_MEETING = 6, 7


class GarHeader(ctypes.Structure):
    """What every rank must agree on in a call."""

    _fields_ = [
        ("sequence", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("signature", ctypes.c_uint64),
        ("geometry", ctypes.c_uint64),
        ("detail", ctypes.c_uint64),
    ]


class GarReport(ctypes.Structure):
    """Why a rank gave up."""

    _fields_ = [
        ("code", ctypes.c_uint64),
        ("word", ctypes.c_uint64),
        ("channel", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("peer", ctypes.c_uint64),
        ("expected", ctypes.c_uint64),
        ("seen", ctypes.c_uint64),
        ("elapsed_ns", ctypes.c_uint64),
        ("mine", GarHeader),
        ("theirs", GarHeader),
    ]


def _launch_fields(table: Any) -> list[tuple[str, Any]]:
    """The fields of one launch on one rank.

    Args:
        table: the type of a table of addresses by rank.
    """
    return [
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("seed", ctypes.c_void_p),
        ("segments", table),
        ("controls", table),
        ("peer_inputs", table),
        ("peer_outputs", table),
        ("count", ctypes.c_uint64),
        ("chunk_count", ctypes.c_uint64),
        ("slot_bytes", ctypes.c_uint64),
        ("abort_offset", ctypes.c_uint64),
        ("reports_offset", ctypes.c_uint64),
        ("calls_offset", ctypes.c_uint64),
        ("sequence_offset", ctypes.c_uint64),
        ("steps_offset", ctypes.c_uint64),
        ("ready_offset", ctypes.c_uint64),
        ("credit_offset", ctypes.c_uint64),
        ("slots_offset", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("poll", ctypes.c_void_p),
        ("poll_context", ctypes.c_void_p),
        ("header", GarHeader),
        ("rank", ctypes.c_uint32),
        ("nranks", ctypes.c_uint32),
        ("root", ctypes.c_uint32),
        ("nsets", ctypes.c_uint32),
        ("nlinks", ctypes.c_uint32),
        ("nslots", ctypes.c_uint32),
        ("spin", ctypes.c_uint32),
        ("streaming", ctypes.c_uint32),
        ("push", ctypes.c_uint32),
        ("nshards", ctypes.c_uint32),
        ("fold_ranks", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class GarArgs(ctypes.Structure):
    """One launch on one host rank: tables are pointers to the caller's."""

    _fields_ = _launch_fields(ctypes.c_void_p)


class GarDeviceArgs(ctypes.Structure):
    """One launch on one CUDA rank: tables travel with the arguments."""

    _fields_ = _launch_fields(ctypes.c_void_p * TABLE_RANKS)


class GarLaunch(ctypes.Structure):
    """A kernel, its arguments and its blocks, on one host rank."""

    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("args", ctypes.POINTER(GarArgs)),
        ("nblocks", ctypes.c_uint32),
    ]


class GarStridedArgs(ctypes.Structure):
    """A copy between two arrays of one shape on one GPU."""

    _fields_ = [
        ("target", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("naxes", ctypes.c_uint64),
        ("shape", ctypes.c_uint64 * MAX_AXES),
        ("target_strides", ctypes.c_int64 * MAX_AXES),
        ("source_strides", ctypes.c_int64 * MAX_AXES),
    ]


class GarProbeResult(ctypes.Structure):
    """What a GPU found out about another in a probe of peer access."""

    _fields_ = [
        ("code", ctypes.c_uint64),
        ("meeting", ctypes.c_uint64),
        ("round", ctypes.c_uint64),
        ("place", ctypes.c_uint64),
        ("expected", ctypes.c_uint64),
        ("seen", ctypes.c_uint64),
    ]


class GarProbeArgs(ctypes.Structure):
    """A probe of peer access on one GPU."""

    _fields_ = [
        ("areas", ctypes.c_void_p * TABLE_RANKS),
        ("results", ctypes.c_void_p * TABLE_RANKS),
        ("nonce", ctypes.c_uint64),
        ("box_bytes", ctypes.c_uint64),
        ("limit_ns", ctypes.c_uint64),
        ("start_ns", ctypes.c_uint64),
        ("rank", ctypes.c_uint64),
    ]


class GarCopyArgs(ctypes.Structure):
    """A copy by one GPU between any memory that it addresses."""

    _fields_ = [
        ("target", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("nbytes", ctypes.c_uint64),
    ]


class GarWrongWord(ctypes.Structure):
    """The first word that is not what it should be."""

    _fields_ = [
        ("found", ctypes.c_uint64),
        ("index", ctypes.c_uint64),
        ("seen", ctypes.c_uint64),
        ("expected", ctypes.c_uint64),
    ]


class GarPatternArgs(ctypes.Structure):
    """Words that say by their values where they belong."""

    _fields_ = [
        ("words", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("wrong", ctypes.c_void_p),
    ]


class GarHoldArgs(ctypes.Structure):
    """Keeps a stream from going on until the host says so."""

    _fields_ = [
        ("released", ctypes.c_void_p),
        ("expired", ctypes.c_void_p),
        ("limit_ns", ctypes.c_uint64),
    ]


class GarChaseArgs(ctypes.Structure):
    """Loads each of which needs the one before."""

    _fields_ = [
        ("first", ctypes.c_void_p),
        ("last", ctypes.c_void_p),
        ("accesses", ctypes.c_uint64),
    ]


class GarNodesArgs(ctypes.Structure):
    """One GPU's part in a call of several nodes, beside the data."""

    _fields_ = [
        ("header", GarHeader),
        ("mine", ctypes.c_void_p),
        ("theirs", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("abort", ctypes.c_void_p),
        ("limit_ns", ctypes.c_uint64),
        ("neighbours", ctypes.c_uint64),
        ("word", ctypes.c_uint64),
    ]


def set_table(args: GarArgs | GarDeviceArgs, name: str, table: Any) -> None:
    """Gives a launch a table of addresses by rank.

    Args:
        args: the launch.
        name: the field.
        table: a ctypes array of pointers, which the caller keeps alive for a host launch.
    """
    if isinstance(args, GarArgs):
        setattr(args, name, ctypes.addressof(table))
    else:
        getattr(args, name)[: len(table)] = table[:]
