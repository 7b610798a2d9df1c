// The calls of a race test: which kernel, how many elements, in what chunks; drawn from a seed, alike on every rank.
// Knows nothing of threads.
#pragma once

#include "values.h"
#include "world.h"
//
#include "host.h"
#include "one_shot.cuh"
#include "ring.cuh"
#include "shard.cuh"
#include "two_shot.cuh"

#ifndef RACE_RANKS
#define RACE_RANKS 0  // the kernels' rank count where they unroll; 0: known at run time only
#endif

namespace gar {
GAR_KERNEL(race_one_shot, GarArgs, (exchange<OneShot<RaceElement, RaceOperator, RACE_RANKS>>))
GAR_KERNEL(race_reduce, GarArgs, (exchange<Reduce<RaceElement, RaceOperator, RACE_RANKS>>))
GAR_KERNEL(race_reduce_scatter, GarArgs, (exchange<ReduceScatter<RaceElement, RaceOperator, RACE_RANKS>>))
GAR_KERNEL(race_all_gather, GarArgs, (exchange<AllGather<RaceElement>>))
GAR_KERNEL(race_broadcast, GarArgs, (exchange<Broadcast<RaceElement>>))
GAR_KERNEL(race_shard_first, GarArgs, (exchange<ShardReduce<RaceElement, RaceOperator, RACE_RANKS, false, false>>))
GAR_KERNEL(race_shard_between, GarArgs, (exchange<ShardReduce<RaceElement, RaceOperator, RACE_RANKS, true, false>>))
GAR_KERNEL(race_shard_last, GarArgs, (exchange<ShardReduce<RaceElement, RaceOperator, RACE_RANKS, true, true>>))
GAR_KERNEL(race_shard_only, GarArgs, (exchange<ShardReduce<RaceElement, RaceOperator, RACE_RANKS, false, true>>))
GAR_KERNEL(race_shard_gather, GarArgs, (exchange<ShardGather<RaceElement>>))
GAR_KERNEL(race_two_shot, GarArgs, (two_shot<RaceElement, RaceOperator, RACE_RANKS>))
GAR_KERNEL(race_two_shot_direct, GarArgs, (two_shot_direct<RaceElement, RaceOperator, RACE_RANKS>))
GAR_KERNEL(race_ring, GarArgs, (ring<RaceElement, RaceOperator>))
GAR_KERNEL(race_ring_in_rank_order, GarArgs, (ring_in_rank_order<RaceElement, RaceOperator>))
}  // namespace gar

namespace race {

enum Kind {
  kOneShot,
  kReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kShardFirst,
  kShardBetween,
  kShardLast,
  kShardOnly,
  kShardGather,
  kTwoShot,
  kDirect,
  kRing,
  kChain,
  kKinds
};
struct KindRow {
  const char *name, *region;
  GarKernel kernel;
};
constexpr KindRow kKindRows[kKinds] = {
    {"one_shot", "exchange", gar::race_one_shot},
    {"reduce", "exchange", gar::race_reduce},
    {"reduce_scatter", "exchange", gar::race_reduce_scatter},
    {"all_gather", "exchange", gar::race_all_gather},
    {"broadcast", "exchange", gar::race_broadcast},
    {"shard_first", "exchange", gar::race_shard_first},
    {"shard_between", "exchange", gar::race_shard_between},
    {"shard_last", "exchange", gar::race_shard_last},
    {"shard_only", "exchange", gar::race_shard_only},
    {"shard_gather", "exchange", gar::race_shard_gather},
    {"two_shot", "two_shot", gar::race_two_shot},
    {"two_shot_direct", "two_shot", gar::race_two_shot_direct},
    {"ring", "ring", gar::race_ring},
    {"ring_in_rank_order", "ring_in_rank_order", gar::race_ring_in_rank_order},
};

struct Call {
  uint64_t number, count, chunk;
  uint32_t nchannels, root, nshards;
  Kind kind;
  bool in_place, push, streaming;

  const KindRow& row() const { return kKindRows[kind]; }
  // Arrays of all ranks' blocks.
  bool wide_input() const { return kind == kReduceScatter; }
  bool wide_output() const { return kind == kAllGather; }
  bool shard_reduce() const { return kind >= kShardFirst && kind <= kShardOnly; }
  bool seeded() const { return kind == kShardBetween || kind == kShardLast; }
  bool rounded() const { return kind == kShardLast || kind == kShardOnly; }
  // Arrays begin and end at a rank's own alignment.
  uint64_t shift(uint32_t rank) const { return hash(number, rank, 99) & 1; }
};

// Draws the calls of a run.
class Script {
 public:
  const uint64_t seed, calls;
  std::vector<Region> regions;  // by kind

  Script(const Options& o, const World& world)
      : seed(o.number("seed")), calls(o.number("ncalls")), world_(world), counts_(o.numbers("counts")) {
    const char* names = o.text("kernels");
    const uint64_t push = o.number("push");  // 0, 1, or 2 for either
    push_mask_ = push == 2 ? 1 : 0;
    push_always_ = push == 1;
    for (int kind = 0; kind < kKinds; ++kind) {
      regions.push_back(World::region(o, kKindRows[kind].region));
      if (listed(names, kKindRows[kind].name)) kinds_.push_back(Kind(kind));
    }
    if (kinds_.empty()) fail(kUsage, "no kernel in %s", names);
  }
  uint64_t largest_count() const {
    uint64_t largest = 1;
    for (uint64_t count : counts_) largest = count > largest ? count : largest;
    return largest;
  }
  Call draw(uint64_t number) const {
    const auto any = [&](uint64_t field) { return hash(seed, number, field); };
    Call call = {};
    call.number = number;
    call.kind = kinds_[any(0) % kinds_.size()];
    call.count = counts_[any(1) % counts_.size()];
    call.nchannels = uint32_t(1 + any(2) % world_.max_channels);
    call.root = uint32_t(any(3) % world_.nranks);
    call.nshards = uint32_t(1 + any(8) % world_.nranks);
    call.in_place = !call.wide_input() && !call.wide_output() && any(4) % 2;
    call.push = push_always_ || (any(5) & push_mask_);
    call.streaming = any(6) % 4 == 0;
    call.chunk = chunk(call, 1 + any(7) % 6);
    return call;
  }

 private:
  const World& world_;
  const std::vector<uint64_t> counts_;
  std::vector<Kind> kinds_;
  uint64_t push_mask_;
  bool push_always_;

  static bool listed(const char* names, const char* name) {
    const size_t length = strlen(name);
    for (const char* at = names; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : nullptr)
      if (strncmp(at, name, length) == 0 && (at[length] == ',' || at[length] == 0)) return true;
    return false;
  }
  // Elements of a chunk for about so many rounds, as far as slots hold them.
  uint64_t chunk(const Call& call, uint64_t rounds) const {
    const bool sliced = call.kind == kTwoShot || call.kind == kRing;
    const uint64_t parts = sliced ? world_.nranks : call.shard_reduce() || call.kind == kShardGather ? call.nshards : 1;
    const uint64_t widest = sizeof(Accumulator) > sizeof(Storage) ? sizeof(Accumulator) : sizeof(Storage);
    const uint64_t most = regions[call.kind].slot_bytes / widest;
    const uint64_t wanted = call.count / rounds / call.nchannels / parts + 1;
    return wanted < most ? wanted : most;
  }
};

}  // namespace race
