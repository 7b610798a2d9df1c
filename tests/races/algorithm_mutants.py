"""Mutants of single algorithms, of the element types, and of the host's launcher.

Knows nothing of the words and waits that all kernels share.
"""

from __future__ import annotations

from races.harness import Scenario
from races.mutant import Mutant, of

PRIMITIVES = "primitives.cuh"
EXCHANGE = ("one_shot", "reduce", "reduce_scatter", "all_gather", "broadcast")

MUTANTS = (
    Mutant(
        "the caller reads results before the workers have published them",
        "release and acquire",
        "host.cpp",
        "pending_.fetch_sub(1, std::memory_order_release)",
        "pending_.fetch_sub(1, std::memory_order_relaxed)",
        of("one_shot", workers=True),
    ),
    Mutant(
        "exchange: half the slots that it needs",
        "slots without credit",
        PRIMITIVES,
        "(step & (args.nslots - 1))",
        "(step & (args.nslots / 2 - 1))",
        of(*EXCHANGE),
    ),
    Mutant(
        "exchange: ready before the data",
        "slots without credit",
        "one_shot.cuh",
        "collective.stage(i + 1, first + i + 1);\n      channel.post_ready_all(first + i + 1);",
        "channel.post_ready_all(first + i + 1);\n      collective.stage(i + 1, first + i + 1);",
        of("one_shot"),
    ),
    Mutant(
        "two-shot: half the slots that it needs",
        "two words a round",
        PRIMITIVES,
        "(step & (args.nslots - 1))",
        "(step % (args.nslots / 2))",
        of("two_shot"),
    ),
    Mutant(
        "two-shot: ready before the slices",
        "two words a round",
        "two_shot.cuh",
        "      shot.stage(i + 1, first + i + 1);\n"
        "      channel.post_ready_all(first + i + 1, Shot::kOut);",
        "      channel.post_ready_all(first + i + 1, Shot::kOut);\n"
        "      shot.stage(i + 1, first + i + 1);",
        of("two_shot"),
    ),
    Mutant(
        "two-shot: gathered before all have folded",
        "two words a round",
        "two_shot.cuh",
        "if (!channel.await_ready_all(first + i - 1, Shot::kBack)) return false;",
        "",
        of("two_shot"),
    ),
    Mutant(
        "two-shot: one word for both halves of a round",
        "two words a round",
        PRIMITIVES,
        "(uint64_t(index) * args.nsets + set) * nranks",
        "uint64_t(index) * args.nsets * nranks",
        of("two_shot"),
    ),
    Mutant(
        "direct: nobody waits for the others' inputs",
        "direct meets twice",
        "two_shot.cuh",
        "if (!channel.begin()) return false;",
        "channel.post_call();",
        of("two_shot_direct"),
    ),
    Mutant(
        "direct: ranks leave while others write to them",
        "direct meets twice",
        "two_shot.cuh",
        "if (!channel.await_ready_all(channel.first_step())) return false;",
        "",
        of("two_shot_direct"),
    ),
    Mutant(
        "ring: slots are written again unread",
        "ring steps",
        "ring.cuh",
        "if (Send) failed = failed || !channel.await_credit(next, send_step, set);",
        "",
        of("ring", nranks=4, ncalls=200, counts=(1001,)),
    ),
    Mutant(
        "ring: the block moves data before thread 0 has waited",
        "ring steps",
        "ring.cuh",
        "return !channel.block.sync_or(failed);",
        "return !failed;",
        of("ring"),
        block_threads=4,
    ),
    Mutant(
        "ring: thread 0 tells before the block has moved the data",
        "ring steps",
        "ring.cuh",
        "void close() {\n    channel.block.sync();",
        "void close() {",
        of("ring"),
        block_threads=4,
    ),
    Mutant(
        "chain: results are stored over unread ones",
        "chain lag",
        "ring.cuh",
        "if (!partials.open<true, false>() || !results.open<false, true>()) return false;",
        "if (!partials.open<true, false>()) return false;",
        of("ring_in_rank_order"),
    ),
    Mutant(
        "chain: results are taken so late that partials fill all slots",
        "chain lag",
        "ring.cuh",
        "lag = channel.nranks;",
        "lag = (channel.nranks + 1) * args.nslots;",
        Scenario(
            kernels=("ring_in_rank_order",),
            max_channels=1,
            ncalls=2,
            counts=(9001,),
            timeout_ms=500,
        ),
    ),
    Mutant(
        "a NaN keeps the payload that it came with",
        "canonical NaN",
        "dtypes.cuh",
        "return select(a != a, splat<Lanes<T, N>>(quiet_nan(T())), a);",
        "return a;",
        of("one_shot"),
        element="float",
    ),
    Mutant(
        "blocks that wait for each other share a thread",
        "residency",
        "host.cpp",
        "Worker* worker = workers_[i - 1].get();\n    {",
        "Worker* worker = workers_[0].get();\n"
        "    while (worker->task.load(std::memory_order_acquire)) sched_yield();\n"
        "    {",
        Scenario(kernels=("one_shot",), nranks=3, workers=True, timeout_ms=500),
    ),
)
