"""Copies between GPU arrays of any strides: geometry only, and the kernel that does them.

Knows nothing of streams or devices.
"""

from __future__ import annotations

from gpuallreduce.args import MAX_AXES, GarStridedArgs
from gpuallreduce.arrays import Array
from gpuallreduce.errors import NotSupported
from gpuallreduce.jit import Kernel

__all__ = ["MAX_BLOCK", "Axis", "merged_axes", "plan_move"]

MAX_BLOCK = 256  # threads
ELEMENTS_PER_THREAD = 4
MAX_BLOCKS = 1024

Axis = tuple[int, int, int]  # size, stride in the target, stride in the source


def merged_axes(axes: list[Axis]) -> list[Axis]:
    """The same elements in the same order by the fewest axes."""
    merged: list[Axis] = []
    for size, to, origin in axes:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * to and merged[-1][2] == size * origin:
            merged[-1] = (merged[-1][0] * size, to, origin)
        else:
            merged.append((size, to, origin))
    return merged


def plan_move(target: Array, source: Array) -> tuple[Kernel, GarStridedArgs, int]:
    """The kernel, its arguments and its blocks for ``target[...] = source``.

    Raises:
        NotSupported: more axes are left than the kernel knows.
    """
    axes = list(zip(target.shape, target.strides, source.strides, strict=True))
    width = target.itemsize
    if width == 16:  # as pairs of words
        axes, width = [*axes, (2, 8, 8)], 8
    axes = merged_axes(axes)
    if len(axes) > MAX_AXES:
        raise NotSupported(
            f"an array of shape {target.shape} has {len(axes)} strided axes, at most {MAX_AXES} "
            "can be copied; pass cupy.ascontiguousarray(x)"
        )
    args = GarStridedArgs(target=target.data.ptr, source=source.data.ptr, naxes=len(axes))
    args.count = 1
    for i, (size, to, origin) in enumerate(axes):
        args.count *= size
        args.shape[i], args.target_strides[i], args.source_strides[i] = size, to, origin
    per_block = MAX_BLOCK * ELEMENTS_PER_THREAD
    nblocks = max(1, min(MAX_BLOCKS, -(-args.count // per_block)))
    kernel = Kernel(
        f"strided_copy_{width}",
        "strided.cuh",
        f"strided_copy<uint{8 * width}_t>",
        arguments="GarStridedArgs",
    )
    return kernel, args, nblocks
