"""Mutants of the kernels that fold and collect one node's shards.

Knows nothing of the words and waits that all kernels share.
"""

from __future__ import annotations

from races.mutant import Mutant, of

SHARD = "shard.cuh"
REDUCE = ("shard_first", "shard_between", "shard_last", "shard_only")

MUTANTS = (
    Mutant(
        "shards: what the nodes before folded comes last",
        "shards",
        SHARD,
        "if constexpr (Seeded) sum = Op::combine(came[u], sum);",
        "if constexpr (Seeded) sum = Op::combine(sum, came[u]);",
        of("shard_last"),
        operator="InOrder",
    ),
    Mutant(
        "shards: a seed is looked for as if it were elements",
        "shards",
        SHARD,
        "(this->args.seed) + at * sizeof(A)",
        "(this->args.seed) + at * sizeof(S)",
        of("shard_between"),
        element="Float16",
    ),
    Mutant(
        "shards: partials are stored as if they were elements",
        "shards",
        SHARD,
        "at * (Rounded ? sizeof(S) : sizeof(A))",
        "at * sizeof(S)",
        of("shard_first"),
        element="Float16",
    ),
    Mutant(
        "shards: every channel begins at the start of a shard's buffer",
        "shards",
        SHARD,
        "return slice.lo - shard(channel.rank).lo;",
        "return slice.lo - mine(channel.rank).lo;",
        of("shard_only", counts=(1001,)),
    ),
    Mutant(
        "shards: a rank takes its neighbour's shard",
        "shards",
        SHARD,
        "return part<S>({0, args.count}, owner, args.nshards);",
        "return part<S>({0, args.count}, (owner + 1) % args.nshards, args.nshards);",
        of("shard_only"),
    ),
    Mutant(
        "shards: ranks without a shard bring nothing",
        "shards",
        SHARD,
        "if (owner >= this->args.nshards) continue;",
        "if (owner >= this->args.nshards || !this->owns()) continue;",
        of(*REDUCE, nranks=3),
    ),
    Mutant(
        "shards: an owner does not hand out its shard",
        "shards",
        SHARD,
        "if (!this->owns() || channel.nranks == 1) return;",
        "if (channel.rank + 1 == this->args.nshards) return;",
        of("shard_gather"),
    ),
    Mutant(
        "shards: avg divides by the ranks of one node",
        "shards",
        SHARD,
        "finish<A>(sum, fold_ranks)",
        "finish<A>(sum, nranks)",
        of("shard_last"),
        element="float",
        operator="Avg",
    ),
    Mutant(
        "shards: ranks go as many rounds as their own shards take",
        "shards",
        SHARD,
        "rounds_of(part<S>(shard(0), 0, channel.block.count()), args.chunk_count)",
        "rounds_of(mine(channel.rank), args.chunk_count)",
        of(*REDUCE, nranks=3, counts=(257, 1001)),
    ),
    Mutant(
        "shards: a channel goes as many rounds as it takes in the first shard",
        "shards",
        SHARD,
        "part<S>(shard(0), 0, channel.block.count())",
        "part<S>(shard(0), channel.index, channel.block.count())",
        # 7 lines: 4 in the first shard, 2 a channel; 3 in the second, 1 a channel.
        of("shard_only", counts=(7 * 32,), max_channels=3),
    ),
)
