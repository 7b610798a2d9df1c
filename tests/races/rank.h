// One rank of a race test: its arrays, its arguments, and the check of what came out.
// Knows nothing of threads.
#pragma once

#include "shards.h"

namespace race {

// A rank's array for all calls. It ends where the memory ends, so that an address sanitizer sees every overrun.
class Buffer {
 public:
  explicit Buffer(uint64_t capacity)
      : capacity_(capacity), memory_(static_cast<Storage*>(malloc(capacity * sizeof(Storage)))) {}
  ~Buffer() { free(memory_); }
  Buffer(const Buffer&) = delete;
  // The array of a call: `count` elements, `shift` before the end of the memory.
  Storage* array(uint64_t count, uint64_t shift) const { return memory_ + (capacity_ - count - shift); }

 private:
  const uint64_t capacity_;
  Storage* const memory_;
};

class Rank {
 public:
  static constexpr uint64_t kGuard = 3;  // elements before and, shifted arrays only, after the output that must stay
  const uint32_t rank;
  GarArgs args = {};
  Rank(const World& world, const Script& script, uint32_t the_rank)
      : rank(the_rank),
        world_(world),
        script_(script),
        inputs_(script.largest_count() * world.nranks + kGuard + 2),
        outputs_(script.largest_count() * world.nranks + kGuard + 2),
        table_inputs_(world.nranks),
        table_outputs_(world.nranks) {}

  Storage* input(const Call& call) const {
    return inputs_.array(call.count * (call.wide_input() ? world_.nranks : 1), call.shift(rank));
  }
  Storage* output(const Call& call) const {
    return call.in_place ? input(call)
                         : outputs_.array(call.count * (call.wide_output() ? world_.nranks : 1), call.shift(rank));
  }

  // Writes the input, spoils the output, and sets the kernel's arguments.
  void prepare(const Call& call, const std::vector<std::unique_ptr<Rank>>& all, uint64_t timeout_ns) {
    const uint64_t brings = call.count * (call.wide_input() ? world_.nranks : 1);
    Storage* const in = input(call);
    for (uint64_t i = 0; i < brings; ++i) in[i] = value(call.number, rank, i);
    if (!call.in_place) memset(static_cast<void*>(output(call)), 0x5a, results(call) * sizeof(Storage));
    memset(static_cast<void*>(output(call) - kGuard), 0x6b, kGuard * sizeof(Storage));
    if (call.shift(rank)) memset(static_cast<void*>(output(call) + results(call)), 0x6b, sizeof(Storage));
    for (uint32_t r = 0; r < world_.nranks; ++r) {
      table_inputs_[r] = all[r]->input(call);
      table_outputs_[r] = all[r]->output(call);
    }
    set_arguments(call, timeout_ns);
    if (call.shard_reduce() || call.kind == kShardGather) shards_.prepare(call, rank, args);
  }

  // Exits where an element, or memory around the output, is not as it must be.
  void check(const Call& call) const {
    const Storage* const out = output(call);
    if (call.shard_reduce()) check_shard(call);
    for (uint64_t i = 0; i < results(call); ++i)
      if (!as_expected(call, i, out[i]))
        fail(kWrongResult, "wrong: call %llu %s rank %u of %u element %llu of %llu, chunk %llu, %u channels, push %d",
             (unsigned long long)call.number, call.row().name, rank, world_.nranks, (unsigned long long)i,
             (unsigned long long)call.count, (unsigned long long)call.chunk, call.nchannels, int(call.push));
    Storage guard;
    memset(static_cast<void*>(&guard), 0x6b, sizeof guard);
    bool intact = !call.shift(rank) || same_bits(out[results(call)], guard);
    for (uint64_t i = 1; i <= kGuard; ++i) intact = intact && same_bits(out[-int64_t(i)], guard);
    if (!intact) fail(kWrongResult, "wrong: %s wrote outside of its output", call.row().name);
  }

 private:
  const World& world_;
  const Script& script_;
  const Buffer inputs_, outputs_;
  std::vector<void*> table_inputs_, table_outputs_;
  ShardBuffers shards_;

  void check_shard(const Call& call) const {
    const uint64_t wrong = shards_.first_wrong(call, rank, world_.nranks);
    if (wrong < ShardBuffers::Cut(call, rank).n)
      fail(kWrongResult, "wrong: call %llu %s rank %u of %u element %llu of shard %u of %u, %llu elements, chunk %llu",
           (unsigned long long)call.number, call.row().name, rank, world_.nranks, (unsigned long long)wrong, rank,
           call.nshards, (unsigned long long)call.count, (unsigned long long)call.chunk);
  }
  uint64_t results(const Call& call) const { return call.count * (call.wide_output() ? world_.nranks : 1); }

  bool as_expected(const Call& call, uint64_t i, const Storage& got) const {
    if (call.kind == kAllGather) return same_bits(got, value(call.number, uint32_t(i / call.count), i % call.count));
    if (call.kind == kShardGather) return same_bits(got, value(call.number, ShardBuffers::owner(call, i), i));
    if (call.kind == kBroadcast) return same_bits(got, value(call.number, call.root, i));
    if ((call.kind == kReduce && rank != call.root) || call.shard_reduce()) {
      Storage before;
      memset(static_cast<void*>(&before), 0x5a, sizeof before);
      return same_bits(got, call.in_place ? value(call.number, rank, i) : before);
    }
    const uint64_t at = call.kind == kReduceScatter ? rank * call.count + i : i;
    return same_bits(got, folded(call.number, world_.nranks, at)) && canonical(got);
  }

  void set_arguments(const Call& call, uint64_t timeout_ns) {
    const Region& region = script_.regions[call.kind];
    args.input = input(call);
    args.output = output(call);
    args.segments = args.controls = world_.segments.data();
    args.peer_inputs = table_inputs_.data();
    args.peer_outputs = table_outputs_.data();
    args.count = call.count;
    args.chunk_count = call.chunk;
    args.slot_bytes = region.slot_bytes;
    args.abort_offset = world_.abort;
    args.reports_offset = world_.reports;
    args.calls_offset = world_.calls;
    args.sequence_offset = world_.sequence;
    args.steps_offset = region.steps;
    args.ready_offset = region.ready;
    args.credit_offset = region.credit;
    args.slots_offset = region.slots;
    args.timeout_ns = timeout_ns;
    args.header = {0, call.count, uint64_t(call.kind), call.chunk << 16 | call.nchannels, call.number};
    args.rank = rank;
    args.nranks = world_.nranks;
    args.root = call.root;
    args.nsets = uint32_t(region.nsets);
    args.nlinks = uint32_t(region.nlinks);
    args.nslots = uint32_t(region.nslots);
    args.spin = 20;
    args.streaming = call.streaming;
    args.push = call.push;
  }
};

}  // namespace race
