// The calls of shards in a race test: what a rank brings beside its array, and what must come out.
// Knows nothing of threads, nor of arguments beyond those of shards.
#pragma once

#include <memory>

#include "calls.h"

namespace race {

// One rank's seeds and shard of a call. Both end where their memory ends.
class ShardBuffers {
 public:
  // The shard of a rank: as the kernels cut it, by another way to count.
  struct Cut {
    uint64_t lo, n;
    Cut(const Call& call, uint32_t owner) : lo(0), n(0) {
      const uint64_t line = gar::kLineBytes / sizeof(Storage);
      uint64_t lines = (call.count + line - 1) / line, each = 0;
      while (each * call.nshards < lines) ++each;
      lo = owner * each * line;
      const uint64_t end = lo + each * line;
      if (owner < call.nshards && lo < call.count) n = (end < call.count ? end : call.count) - lo;
    }
  };

  void prepare(const Call& call, uint32_t rank, GarArgs& args) {
    const Cut cut(call, rank);
    args.nshards = call.nshards;
    args.fold_ranks = kFoldRanks;
    shard_.reset(new char[cut.n * item_bytes(call)]);
    seeds_.reset(new Accumulator[cut.n]);
    if (call.kind == kShardGather) {
      for (uint64_t i = 0; i < cut.n; ++i) put(i, value(call.number, rank, cut.lo + i));
      args.input = cut.n ? shard_.get() : nullptr;
      return;
    }
    memset(shard_.get(), 0x5a, cut.n * item_bytes(call));
    for (uint64_t i = 0; i < cut.n; ++i) seeds_[i] = seed(call, cut.lo + i);
    args.output = cut.n ? shard_.get() : nullptr;
    args.seed = call.seeded() ? seeds_.get() : nullptr;
  }
  // The first element of the shard that is not as it must be, or the shard's length.
  uint64_t first_wrong(const Call& call, uint32_t rank, uint32_t nranks) const {
    const Cut cut(call, rank);
    for (uint64_t i = 0; i < cut.n; ++i)
      if (!(call.rounded() ? is_rounded(call, i, cut.lo + i, nranks) : is_partial(call, i, cut.lo + i, nranks)))
        return i;
    return cut.n;
  }
  static uint32_t owner(const Call& call, uint64_t index) {
    for (uint32_t rank = 0;; ++rank)
      if (index < Cut(call, rank).lo + Cut(call, rank).n) return rank;
  }

 private:
  static constexpr uint32_t kFoldRanks = 16;  // not the ranks of the call
  std::unique_ptr<char[]> shard_;
  std::unique_ptr<Accumulator[]> seeds_;

  static uint64_t item_bytes(const Call& call) {
    return call.kind == kShardGather || call.rounded() ? sizeof(Storage) : sizeof(Accumulator);
  }
  void put(uint64_t i, const Storage& storage) { memcpy(shard_.get() + i * sizeof storage, &storage, sizeof storage); }

  // What the nodes before have folded: never an element, where accumulators are wider.
  static Accumulator seed(const Call& call, uint64_t index) {
    Accumulator lane;
    fill(lane, hash(call.number, 77, index));
    return lane;
  }
  static Folded expected(const Call& call, uint64_t index, uint32_t nranks) {
    const Accumulator before = seed(call, index);
    Folded sum = gar::load_lanes<Accumulator, 1>(&before, 0);
    for (uint32_t rank = 0; rank < nranks; ++rank) {
      const Folded next = widened(call.number, rank, index);
      sum = rank == 0 && !call.seeded() ? next : Operator::combine(sum, next);
    }
    return sum;
  }
  bool is_partial(const Call& call, uint64_t i, uint64_t index, uint32_t nranks) const {
    typedef gar::Element<Accumulator> Partial;  // of a NaN in a partial the payload is open; see NOTE canonical NaN
    const auto want = Partial::template round<1>(expected(call, index, nranks));
    const auto found = Partial::template round<1>(gar::load_lanes<Accumulator, 1>(shard_.get(), i));
    return memcmp(&want, &found, sizeof want) == 0;
  }
  bool is_rounded(const Call& call, uint64_t i, uint64_t index, uint32_t nranks) const {
    const Stored want = Element::round<1>(Operator::finish<Accumulator>(expected(call, index, nranks), kFoldRanks));
    return memcmp(&want, shard_.get() + i * sizeof want, sizeof want) == 0;
  }
};

}  // namespace race
