"""The table of protocol mutants: faults put into copies of the kernels, each with the run that must notice it.

Knows nothing of how a run is made; see harness.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from races.harness import Build, Scenario

_EXCHANGE = ("one_shot", "reduce", "reduce_scatter", "all_gather", "broadcast")
_PRIMITIVES, _PLATFORM = "primitives.cuh", "platform_host.cuh"


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: what is wrong.
        note: the NOTE block of the kernels whose promise it breaks.
        file: the source that is changed.
        old, new: every occurrence of the one text becomes the other.
        scenario: the smallest run that notices.
        block_threads, element: how the driver is built.
        occurrences: how often the text must be found.
    """

    name: str
    note: str
    file: str
    old: str
    new: str
    scenario: Scenario = field(default_factory=Scenario)
    block_threads: int = 1
    element: str = "uint32_t"
    occurrences: int = 1

    def build(self, **more: object) -> Build:
        """How the driver is built for it."""
        return Build(block_threads=self.block_threads, element=self.element, **more)  # type: ignore[arg-type]


def _of(*kernels: str, **more: object) -> Scenario:
    return Scenario(kernels=kernels, timeout_ms=3000, **more)  # type: ignore[arg-type]


MUTANTS = (
    Mutant(
        "a ring awaits ready one step early",
        "words",
        _PRIMITIVES,
        "return wait(pair_line(rank, args.ready_offset, set, from), step + 1,",
        "return wait(pair_line(rank, args.ready_offset, set, from), step,",
        _of("ring"),
    ),
    Mutant(
        "an exchange awaits ready one step early",
        "words",
        _PRIMITIVES,
        "failed = !wait(pair_line(rank, args.ready_offset, set, from), step + 1,",
        "failed = !wait(pair_line(rank, args.ready_offset, set, from), step,",
        _of("one_shot"),
    ),
    Mutant(
        "credit is awaited one step early",
        "words",
        _PRIMITIVES,
        "step + 1 - args.nslots",
        "step - args.nslots",
        _of("ring", nranks=4, ncalls=200, counts=(1001,)),
    ),
    Mutant(
        "words are compared as they stand, not by their distance",
        "words",
        _PRIMITIVES,
        "int64_t(seen - want) >= 0",
        "seen >= want",
        _of("one_shot", preset=2**64 - 10),
        occurrences=2,
    ),
    Mutant(
        "steps start at zero in every call",
        "words",
        _PRIMITIVES,
        "= first_step_ + steps;",
        "= first_step_;",
        _of("one_shot"),
    ),
    Mutant(
        "channels share their words",
        "words",
        _PRIMITIVES,
        "(uint64_t(index) * args.nsets + set) * nranks",
        "uint64_t(set) * nranks",
        _of("ring"),
    ),
    Mutant(
        "words are stored without release",
        "release and acquire",
        _PLATFORM,
        "__atomic_store_n(word, value, __ATOMIC_RELEASE)",
        "__atomic_store_n(word, value, __ATOMIC_RELAXED)",
        _of("one_shot"),
    ),
    Mutant(
        "words are loaded without acquire",
        "release and acquire",
        _PLATFORM,
        "__atomic_load_n(word, __ATOMIC_ACQUIRE)",
        "__atomic_load_n(word, __ATOMIC_RELAXED)",
        _of("one_shot"),
    ),
    Mutant(
        "ready is posted before the block has written",
        "release and acquire",
        _PRIMITIVES,
        "void post_ready_all(uint64_t step, uint32_t set = 0) const {\n    block.sync();",
        "void post_ready_all(uint64_t step, uint32_t set = 0) const {",
        _of("one_shot"),
        block_threads=4,
    ),
    Mutant(
        "the call is posted before the block has written",
        "release and acquire",
        _PRIMITIVES,
        "void post_call() const {\n    block.sync();",
        "void post_call() const {",
        _of("one_shot"),
        block_threads=4,
    ),
    Mutant(
        "the block reads before its threads have met",
        "release and acquire",
        _PRIMITIVES,
        "kReady, step, from);\n    return !block.sync_or(failed);",
        "kReady, step, from);\n    return !failed;",
        _of("one_shot"),
        block_threads=4,
    ),
    Mutant(
        "the caller reads results before the workers have published them",
        "release and acquire",
        "host.cpp",
        "pending_.fetch_sub(1, std::memory_order_release)",
        "pending_.fetch_sub(1, std::memory_order_relaxed)",
        _of("one_shot", workers=True),
    ),
    Mutant(
        "one call line for all calls",
        "call lines",
        _PRIMITIVES,
        "(uint64_t(index) * 2 + (sequence_ & 1))",
        "(uint64_t(index) * 2)",
        _of("broadcast", ncalls=200, counts=(1,)),
    ),
    Mutant(
        "calls are not counted",
        "call lines",
        _PRIMITIVES,
        "*line(rank, args.sequence_offset, index) = sequence_;",
        "",
        _of("one_shot"),
    ),
    Mutant(
        "every thread that gives up reports",
        "aborts",
        _PLATFORM,
        "return __atomic_exchange_n(word, 1, __ATOMIC_ACQ_REL) == 0;",
        "return word != nullptr;",
        _of("ring", nranks=3, ending="differs"),
    ),
    Mutant(
        "a report's code is written plainly first",
        "aborts",
        _PRIMITIVES,
        "for (uint64_t i = 1; i < sizeof(GarReport)",
        "for (uint64_t i = 0; i < sizeof(GarReport)",
        _of("ring", nranks=3, ending="stalls", counts=(1001,)),
    ),
    Mutant(
        "nobody looks at the abort word",
        "aborts",
        _PRIMITIVES,
        "if (load_acquire(abort_word(rank)) != 0) return",
        "if (word == nullptr) return",
        Scenario(kernels=("ring",), ending="aborts", timeout_ms=500),
    ),
    Mutant(
        "exchange: half the slots that it needs",
        "slots without credit",
        _PRIMITIVES,
        "(step & (args.nslots - 1))",
        "(step & (args.nslots / 2 - 1))",
        _of(*_EXCHANGE),
    ),
    Mutant(
        "exchange: ready before the data",
        "slots without credit",
        "one_shot.cuh",
        "collective.stage(i + 1, first + i + 1);\n      channel.post_ready_all(first + i + 1);",
        "channel.post_ready_all(first + i + 1);\n      collective.stage(i + 1, first + i + 1);",
        _of("one_shot"),
    ),
    Mutant(
        "two-shot: staged before the last round is gathered",
        "two words a round",
        "two_shot.cuh",
        "  for (uint64_t i = 0; i < rounds; ++i) {\n    if (i > 0) {",
        "  for (uint64_t i = 0; i < rounds; ++i) {\n"
        "    if (i + 1 < rounds) {\n"
        "      shot.stage(i + 1, first + i + 1);\n"
        "      channel.post_ready_all(first + i + 1, Shot::kOut);\n"
        "    }\n"
        "    if (i > 0) {",
        _of("two_shot"),
    ),
    Mutant(
        "two-shot: the last round is gathered unseen",
        "two words a round",
        "two_shot.cuh",
        "if (!channel.await_ready_all(first + rounds - 1, Shot::kBack)) return false;",
        "",
        _of("two_shot"),
    ),
    Mutant(
        "two-shot: one word for both halves of a round",
        "two words a round",
        _PRIMITIVES,
        "(uint64_t(index) * args.nsets + set) * nranks",
        "uint64_t(index) * args.nsets * nranks",
        _of("two_shot"),
    ),
    Mutant(
        "direct: nobody waits for the others' inputs",
        "direct meets twice",
        "two_shot.cuh",
        "if (!channel.begin()) return false;",
        "channel.post_call();",
        _of("two_shot_direct"),
    ),
    Mutant(
        "direct: ranks leave while others write to them",
        "direct meets twice",
        "two_shot.cuh",
        "if (!channel.await_ready_all(channel.first_step())) return false;",
        "",
        _of("two_shot_direct"),
    ),
    Mutant(
        "ring: slots are written again unread",
        "ring steps",
        "ring.cuh",
        "if (Send) failed = failed || !channel.await_credit(next, send_step, set);",
        "",
        _of("ring", nranks=4, ncalls=200, counts=(1001,)),
    ),
    Mutant(
        "ring: the block moves data before thread 0 has waited",
        "ring steps",
        "ring.cuh",
        "return !channel.block.sync_or(failed);",
        "return !failed;",
        _of("ring"),
        block_threads=4,
    ),
    Mutant(
        "ring: thread 0 tells before the block has moved the data",
        "ring steps",
        "ring.cuh",
        "void close() {\n    channel.block.sync();",
        "void close() {",
        _of("ring"),
        block_threads=4,
    ),
    Mutant(
        "chain: results are stored over unread ones",
        "chain lag",
        "ring.cuh",
        "if (!partials.open<true, false>() || !results.open<false, true>()) return false;",
        "if (!partials.open<true, false>()) return false;",
        _of("ring_in_rank_order"),
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
        _of("one_shot"),
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
