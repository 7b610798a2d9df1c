"""Mutants of what all kernels share: words, release and acquire, the call lines, giving up.

Knows nothing of any algorithm.
"""

from __future__ import annotations

from races.harness import Scenario
from races.mutant import Mutant, of

PRIMITIVES, PLATFORM = "primitives.cuh", "platform_host.cuh"
POSTS_ONLY_IF_ALL_IS_WELL = (
    "if (block.sync_or(block.thread() == 0 && load_acquire(abort_word(rank)) != 0)) return false;"
)

MUTANTS = (
    Mutant(
        "a ring awaits ready one step early",
        "words",
        PRIMITIVES,
        "return wait(pair_line(rank, args.ready_offset, set, from), step + 1,",
        "return wait(pair_line(rank, args.ready_offset, set, from), step,",
        of("ring"),
    ),
    Mutant(
        "an exchange awaits ready one step early",
        "words",
        PRIMITIVES,
        "failed = !wait(pair_line(rank, args.ready_offset, set, from), step + 1,",
        "failed = !wait(pair_line(rank, args.ready_offset, set, from), step,",
        of("one_shot"),
    ),
    Mutant(
        "credit is awaited one step early",
        "words",
        PRIMITIVES,
        "step + 1 - args.nslots",
        "step - args.nslots",
        of("ring", nranks=4, ncalls=200, counts=(1001,)),
    ),
    Mutant(
        "words are compared as they stand, not by their distance",
        "words",
        PRIMITIVES,
        "int64_t(seen - want) >= 0",
        "seen >= want",
        of("one_shot", preset=2**64 - 10),
        occurrences=2,
    ),
    Mutant(
        "steps start at zero in every call",
        "words",
        PRIMITIVES,
        "= first_step_ + steps;",
        "= first_step_;",
        of("one_shot"),
    ),
    Mutant(
        "channels share their words",
        "words",
        PRIMITIVES,
        "(uint64_t(index) * args.nsets + set) * nranks",
        "uint64_t(set) * nranks",
        of("ring"),
    ),
    Mutant(
        "words are stored without release",
        "release and acquire",
        PLATFORM,
        "__atomic_store_n(word, value, __ATOMIC_RELEASE)",
        "__atomic_store_n(word, value, __ATOMIC_RELAXED)",
        of("one_shot"),
    ),
    Mutant(
        "words are loaded without acquire",
        "release and acquire",
        PLATFORM,
        "__atomic_load_n(word, __ATOMIC_ACQUIRE)",
        "__atomic_load_n(word, __ATOMIC_RELAXED)",
        of("one_shot"),
    ),
    Mutant(
        "ready is posted before the block has written",
        "release and acquire",
        PRIMITIVES,
        "void post_ready_all(uint64_t step, uint32_t set = 0) const {\n    block.sync();",
        "void post_ready_all(uint64_t step, uint32_t set = 0) const {",
        of("one_shot"),
        block_threads=4,
    ),
    Mutant(
        "the call is posted before the block has written",
        "release and acquire",
        PRIMITIVES,
        POSTS_ONLY_IF_ALL_IS_WELL,
        "",
        of("one_shot"),
        block_threads=4,
    ),
    Mutant(
        "the block reads before its threads have met",
        "release and acquire",
        PRIMITIVES,
        "kReady, step, from);\n    return !block.sync_or(failed);",
        "kReady, step, from);\n    return !failed;",
        of("one_shot"),
        block_threads=4,
    ),
    Mutant(
        "one call line for all calls",
        "call lines",
        PRIMITIVES,
        "(uint64_t(index) * 2 + (sequence_ & 1))",
        "(uint64_t(index) * 2)",
        of("broadcast", ncalls=200, counts=(1,)),
    ),
    Mutant(
        "calls are not counted",
        "call lines",
        PRIMITIVES,
        "*line(rank, args.sequence_offset, index) = sequence_;",
        "",
        of("one_shot"),
    ),
    Mutant(
        "every thread that gives up reports",
        "aborts",
        PLATFORM,
        "return __atomic_exchange_n(word, 1, __ATOMIC_ACQ_REL) == 0;",
        "return word != nullptr;",
        of("one_shot", nranks=3, ending="differs"),
        block_threads=4,
    ),
    Mutant(
        "a report's code is written plainly first",
        "aborts",
        PRIMITIVES,
        "for (uint64_t i = 1; i < sizeof(GarReport)",
        "for (uint64_t i = 0; i < sizeof(GarReport)",
        of("ring", nranks=3, ending="stalls", counts=(1001,)),
    ),
    Mutant(
        "a call is posted behind one that was given up",
        "aborts",
        PRIMITIVES,
        POSTS_ONLY_IF_ALL_IS_WELL,
        "block.sync();",
        of("ring", nranks=3, ending="stalls", counts=(1001,)),
    ),
    Mutant(
        "nobody looks at the abort word",
        "aborts",
        PRIMITIVES,
        "if (load_acquire(abort_word(rank)) != 0) return int64_t",
        "if (word == nullptr) return int64_t",
        Scenario(kernels=("ring",), ending="aborts", timeout_ms=500),
    ),
)
