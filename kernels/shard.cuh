// What the ranks of one node do before and after the nodes talk: fold the node's data by shards, collect the shards.
//
//   shard_reduce:  rank s, for s < nshards, folds shard s of all ranks' arrays, on top of what the nodes before folded
//   shard_gather:  rank s hands the finished shard s to all ranks
//
// Both are exchanges of one_shot.cuh: they take the same steps through the same slots. The fold is in rank order, so a
// chain of nodes gives the bits of one node with all their ranks. Knows nothing of how shards travel between nodes.
#pragma once

#include "one_shot.cuh"

namespace gar {

// One pack (or, with N = 1, one element): to = seed op from[0] op from[1] op ..., as accumulators, or finished and
// rounded. U packs, `stride` apart, are loaded before the first is used.
template <class T, class Op, int P, bool Seeded, bool Rounded, int N, int U, class From>
GAR_DEVICE void shard_packs(const From& from, const void* seed, void* to, uint32_t nranks, uint32_t fold_ranks,
                            uint64_t pack, uint64_t stride) {
  typedef Element<T> X;
  typedef typename X::Storage S;
  typedef typename X::Accumulator A;
  constexpr int kHeld = P > 0 ? P : 1;
  Lanes<S, N> raw[kHeld][U];
  Lanes<A, N> came[U];
  GAR_UNROLL for (int u = 0; u < U; ++u) {
    if constexpr (Seeded) came[u] = load_lanes<A, N>(seed, pack + u * stride);
  }
  GAR_UNROLL for (int k = 0; k < kHeld; ++k) {
    GAR_UNROLL for (int u = 0; u < U; ++u)
      raw[k][u] = load_lanes<S, N>(from[k], pack + u * stride);
  }
  GAR_UNROLL for (int u = 0; u < U; ++u) {
    auto sum = X::template widen<N>(raw[0][u]);
    if constexpr (Seeded) sum = Op::combine(came[u], sum);
    if constexpr (P > 0) {
      GAR_UNROLL for (int k = 1; k < P; ++k)
        sum = Op::combine(sum, X::template widen<N>(raw[k][u]));
    } else {
      for (int k = 1; k < int(nranks); ++k)
        sum = Op::combine(sum, X::template widen<N>(load_lanes<S, N>(from[k], pack + u * stride)));
    }
    if constexpr (Rounded) {
      sum = Op::template finish<A>(sum, fold_ranks);
      store_lanes<S, N>(to, pack + u * stride, X::template round<N>(sum));
    } else {
      store_lanes<A, N>(to, pack + u * stride, sum);
    }
  }
}

// Folds n elements of nranks arrays, in the order of `from`, on top of `seed`.
template <class T, class Op, int P, bool Seeded, bool Rounded, class From>
GAR_OUTLINE void fold_shard(const Block& block, const From& slots, const void* seed, void* to, uint32_t nranks,
                            uint32_t fold_ranks, uint64_t n) {
  typedef typename Element<T>::Accumulator A;
  constexpr int N = lanes_in_pack<T>();
  const auto from = shifted<T, P>(slots, 0);
  bool whole = true;
  if constexpr (kVectorsNeedAlignment) {
    const int arrays = P > 0 ? P : int(nranks);
    whole = pack_misalignment(to) == 0 && (!Seeded || pack_misalignment(seed) == 0);
    GAR_UNROLL for (int k = 0; k < arrays; ++k)
      whole = whole && pack_misalignment(from[k]) == 0;
  }
  const uint64_t packs = whole ? n / N : 0, thread = block.thread(), stride = block.threads();
  constexpr int kWide = int(sizeof(A) / element_bytes<T>());  // vectors of accumulators to one of elements
  // Where a pack becomes four or more vectors of accumulators, half as many keep them in registers.
  constexpr int U = packs_together(P == 0 ? 0 : (kWide > 2 ? 2 * P : P) + (Seeded ? kWide : 0));
  const Tiles tiles = tiles_of<U>(block, packs);
  for (uint64_t i = tiles.first; i < tiles.end; i += tiles.step)
    shard_packs<T, Op, P, Seeded, Rounded, N, U>(from, seed, to, nranks, fold_ranks, i, kGroupThreads);
  for (uint64_t i = tiles.end + thread; i < packs; i += stride)
    shard_packs<T, Op, P, Seeded, Rounded, N, 1>(from, seed, to, nranks, fold_ranks, i, 0);
  for (uint64_t i = packs * N + thread; i < n; i += stride)
    shard_packs<T, Op, P, Seeded, Rounded, 1, 1>(from, seed, to, nranks, fold_ranks, i, 0);
}

// NOTE shards. An array is cut into a shard for each of the first ranks of a node, on cache lines, so the last shards
// may be short or empty; each is cut among the channels in the same way. All ranks go as many rounds as the longest
// channel of the longest shard takes, which is the first of the first, and those that have no more to move still meet.
// In a shard's own buffer elements follow each other as in the array.
template <class T>
struct Shards {
  typedef typename Element<T>::Storage S;
  typedef typename Element<T>::Accumulator A;
  const Channel& channel;
  const GarArgs& args;

  GAR_MEMBER explicit Shards(const Channel& the_channel) : channel(the_channel), args(the_channel.args) {}
  GAR_MEMBER bool owns() const { return channel.rank < args.nshards; }
  GAR_MEMBER Range shard(uint32_t owner) const { return part<S>({0, args.count}, owner, args.nshards); }
  GAR_MEMBER Range mine(uint32_t owner) const { return part<S>(shard(owner), channel.index, channel.block.count()); }
  GAR_MEMBER uint64_t rounds() const {
    return rounds_of(part<S>(shard(0), 0, channel.block.count()), args.chunk_count);
  }
  GAR_MEMBER Range slice(uint64_t i, uint32_t owner) const { return piece(mine(owner), i, args.chunk_count); }
  // Where a slice of this rank's own shard lies in the shard's buffer.
  GAR_MEMBER uint64_t in_shard(Range slice) const { return slice.lo - shard(channel.rank).lo; }
};

// The seed is the first operand: what the nodes before folded comes before this node's ranks.
template <class T, class Op, int P, bool Seeded, bool Rounded>
struct ShardReduce : Shards<T> {
  typedef typename Shards<T>::S S;
  typedef typename Shards<T>::A A;
  GAR_MEMBER explicit ShardReduce(const Channel& channel) : Shards<T>(channel) {}
  GAR_MEMBER void stage(uint64_t i, uint64_t step) const {
    const Channel& channel = this->channel;
    for (uint32_t j = 1; j < channel.nranks; ++j) {
      const uint32_t owner = (channel.rank + j) % channel.nranks;
      if (owner >= this->args.nshards) continue;
      const Range s = this->slice(i, owner);
      copy<T>(channel.block, channel.slot(step, channel.rank, owner), element<T>(this->args.input, s.lo), s.n);
    }
  }
  GAR_MEMBER void combine(uint64_t i, uint64_t step) const {
    if (!this->owns()) return;
    const Channel& channel = this->channel;
    const Range s = this->slice(i, channel.rank);
    const FromPrivate from{channel, step, element<T>(this->args.input, s.lo)};
    const uint64_t at = this->in_shard(s);
    const char* seed = Seeded ? static_cast<const char*>(this->args.seed) + at * sizeof(A) : nullptr;
    char* to = static_cast<char*>(this->args.output) + at * (Rounded ? sizeof(S) : sizeof(A));
    fold_shard<T, Op, P, Seeded, Rounded>(channel.block, from, seed, to, channel.nranks, this->args.fold_ranks, s.n);
  }
};

template <class T>
struct ShardGather : Shards<T> {
  GAR_MEMBER explicit ShardGather(const Channel& channel) : Shards<T>(channel) {}
  GAR_MEMBER void stage(uint64_t i, uint64_t step) const {
    const Channel& channel = this->channel;
    if (!this->owns() || channel.nranks == 1) return;
    const Range s = this->slice(i, channel.rank);
    const void* from = element<T>(this->args.input, this->in_shard(s));
    if (!this->args.push) {  // one copy serves all peers
      copy<T>(channel.block, channel.shared_slot(step, channel.rank, channel.rank), from, s.n);
      return;
    }
    for (uint32_t j = 1; j < channel.nranks; ++j) {
      const uint32_t to = (channel.rank + j) % channel.nranks;
      copy<T>(channel.block, channel.shared_slot(step, channel.rank, to), from, s.n);
    }
  }
  GAR_MEMBER void combine(uint64_t i, uint64_t step) const {
    const Channel& channel = this->channel;
    for (uint32_t owner = 0; owner < this->args.nshards; ++owner) {
      const Range s = this->slice(i, owner);
      const void* from = owner == channel.rank ? element<T>(this->args.input, this->in_shard(s))
                                               : channel.shared_slot(step, owner, channel.rank);
      copy<T>(channel.block, element<T>(this->args.output, s.lo), from, s.n, this->args.streaming);
    }
  }
};

}  // namespace gar
