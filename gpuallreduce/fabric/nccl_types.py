"""Which of our dtypes and operators NCCL has, under which numbers, and since when.

Knows nothing of CuPy or communicators: it can be asked on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuallreduce.errors import NotSupported
from gpuallreduce.types import Dtype, Op, reduction

__all__ = ["BYTE", "OPS", "TYPES", "Element", "code_of_version", "element", "text_of_version"]


def code_of_version(text: str) -> int:
    """NCCL's number of a version (2.9 and later): 2.30.3 is 23003."""
    major, minor, patch = (*map(int, text.split(".")), 0)[:3]
    return major * 10000 + minor * 100 + patch


def text_of_version(code: int) -> str:
    """The version of a number, such as ``2.30.3``."""
    step = 10000 if code >= 10000 else 1000
    return f"{code // step}.{code % step // 100}.{code % 100}"


@dataclass(frozen=True)
class Type:
    """A row of NCCL's table of types: its number and the first version that has it."""

    code: int
    since: str = "2.18"


# NCCL's names end in e4m3 and e5m2; they are the types of ml_dtypes.
TYPES: dict[str, Type] = {
    "int8": Type(0),
    "uint8": Type(1),
    "int32": Type(2),
    "uint32": Type(3),
    "int64": Type(4),
    "uint64": Type(5),
    "float16": Type(6),
    "float32": Type(7),
    "float64": Type(8),
    "bfloat16": Type(9),
    "float8_e4m3fn": Type(10, "2.24"),
    "float8_e5m2": Type(11, "2.24"),
}
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
BYTE = TYPES["uint8"].code  # data that are only moved go as bytes, whatever they are

_PARTS = {"complex64": "float32", "complex128": "float64"}
_OTHERWISE = "choose one of our own algorithms (one_shot, two_shot, ring), or another dtype"


@dataclass(frozen=True)
class Element:
    """What a reduction is called with.

    Attributes:
        type_code: NCCL's number of the type.
        op_code: NCCL's number of the operator.
        per_item: NCCL's elements in one element of the array.
    """

    type_code: int
    op_code: int
    per_item: int = 1


def element(dtype: Dtype, op: Op, version: int) -> Element:
    """How NCCL of a version reduces a dtype with an operator.

    Raises:
        NotSupported: the operator makes no sense for the dtype, or NCCL lacks one of them.
    """
    reduction(dtype, op)
    asked = f"{op.name} of {dtype.name} with NCCL"
    if op.name not in OPS:
        raise NotSupported(f"{asked}: it has no {op.name}, only {', '.join(OPS)}; {_OTHERWISE}")
    if dtype.kind == "bool":
        raise NotSupported(
            f"{asked}: it has no bool, and its sums of uint8 wrap at 256 ranks; {_OTHERWISE}"
        )
    name = dtype.name
    if dtype.kind == "complex":
        if op.name not in ("sum", "avg"):
            raise NotSupported(
                f"{asked}: it has no complex types; sum and avg run on their parts, {op.name} "
                f"cannot; {_OTHERWISE}"
            )
        name = _PARTS[name]
    row = TYPES.get(name)
    if row is None:
        raise NotSupported(
            f"{asked}: it has no {name}, only {', '.join(TYPES)} and sums of complex; {_OTHERWISE}"
        )
    if version < code_of_version(row.since):
        raise NotSupported(
            f"{asked}: it has {name} since {row.since}, and {text_of_version(version)} is "
            f"installed; upgrade NCCL, or {_OTHERWISE}"
        )
    return Element(row.code, OPS[op.name], 1 if name == dtype.name else 2)
