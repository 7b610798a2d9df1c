// Do GPUs really reach each other's memory? Stores and loads by kernels, of all pairs at once, compared word by word.
// Knows nothing of collectives, and relies on nothing that it tests.
#pragma once

#include "primitives.cuh"

namespace gar {

// NOTE probe. A driver may grant peer access, and copies may work, where the stores of kernels get lost or their loads
// read something else. So every kernel has a block per peer, and in every round both sides
//   A  write to their own memory, meet, and load each other's;
//   B  store to each other's memory, then a flag as calls do, and check what has arrived once the flag has.
// They meet in host memory, which both reach anyhow: a link that fails is seen, and cannot hold the other side up. In B
// there is no meeting before the check, since it would hide data that arrive behind their flag. Memory holds other
// values in every round, so what was lost, or kept in a cache, shows. Every wait has a limit; whoever finds a fault
// says so in host memory and ends, and its peer with it.
constexpr uint32_t kProbeRounds = 8;
// An area has for each GPU an inbox, which that GPU stores to; an outbox, which it loads from; and a line of words.
constexpr uint64_t kProbeFlag = 0, kProbeClaim = 1;

// What lies at each place. Half of the rounds have values that are nowhere else, the others have what hardware is
// known to answer for nothing, and single bits.
struct ProbePattern {
  uint64_t nonce;
  uint32_t from, to, round, phase;

  static GAR_MEMBER uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 29)) * 0xd6e8feb86659fd93u;
    return x ^ (x >> 32);
  }
  GAR_MEMBER uint64_t word(uint64_t i) const {
    switch (round) {
      case 1:
        return 0;
      case 3:
        return ~uint64_t(0);
      case 5:
        return i & 1 ? 0x5555555555555555u : 0xaaaaaaaaaaaaaaaau;
      case 7:
        return uint64_t(1) << (i & 63);
      default:
        return mixed(mixed(nonce + i) ^ (uint64_t(from) << 40 | uint64_t(to) << 20 | round << 1 | phase));
    }
  }
  GAR_MEMBER uint8_t byte(uint64_t i) const { return uint8_t(word(i / 8) >> (8 * (i % 8))); }
  GAR_MEMBER bool by_bytes() const { return (round & 2) != 0; }
};

class ProbePair {
 public:
  GAR_MEMBER ProbePair(const Block& the_block, const GarProbeArgs& the_args)
      : block(the_block), args(the_args), rank(the_args.rank), peer(the_block.index()) {}

  GAR_MEMBER bool run() {
    if (!meet(0, args.start_ns)) return false;
    for (uint32_t round = 0; round < kProbeRounds; ++round)
      if (!load_from_peer(round) || !store_to_peer(round)) return false;
    return end(kProbeOk);
  }

 private:
  struct Wrong {
    uint64_t place, expected, seen;
  };
  const Block& block;
  const GarProbeArgs& args;
  const uint32_t rank, peer;

  GAR_MEMBER bool load_from_peer(uint32_t round) {
    fill(box(rank, peer, 1), {args.nonce, rank, peer, round, 0});
    return meet(2 * round + 1, args.limit_ns) &&
           check(box(peer, rank, 1), {args.nonce, peer, rank, round, 0}, kProbeWrongLoad, round);
  }
  GAR_MEMBER bool store_to_peer(uint32_t round) {
    fill(box(peer, rank, 0), {args.nonce, rank, peer, round, 1});
    block.sync();
    const uint64_t flag = args.nonce + round;
    uint64_t fault = 0;
    if (block.thread() == 0) {
      store_release(word(peer, rank, kProbeFlag), flag);
      if (!await(word(rank, peer, kProbeFlag), flag, args.limit_ns)) fault = kProbeNoStore;
    }
    if (block.sync_or(fault != 0)) return end(fault);
    return check(box(rank, peer, 0), {args.nonce, peer, rank, round, 1}, kProbeWrongStore, round) &&
           meet(2 * round + 2, 2 * args.limit_ns);  // the peer may wait for a flag first, and shall tell
  }

  // ---- memory -------------------------------------------------------------------------------------------------
  GAR_MEMBER char* area(uint32_t owner, uint32_t other) const {
    return static_cast<char*>(args.areas[owner]) + other * (2 * args.box_bytes + kLineBytes);
  }
  GAR_MEMBER char* box(uint32_t owner, uint32_t other, uint32_t which) const {
    return area(owner, other) + which * args.box_bytes;
  }
  GAR_MEMBER uint64_t* word(uint32_t owner, uint32_t other, uint64_t number) const {
    return reinterpret_cast<uint64_t*>(area(owner, other) + 2 * args.box_bytes) + number;
  }
  GAR_MEMBER GarProbeResult* result(uint32_t owner, uint32_t other) const {
    return reinterpret_cast<GarProbeResult*>(static_cast<char*>(args.results[owner]) + other * kLineBytes);
  }

  static constexpr int kWords = kPackBytes / 8;
  union Pack {
    uint64_t words[kWords];
    Lanes<uint64_t, kWords> lanes;
  };

  GAR_MEMBER void fill(char* to, const ProbePattern& pattern) const {
    if (pattern.by_bytes()) {
      for (uint64_t i = block.thread(); i < args.box_bytes; i += block.threads()) to[i] = char(pattern.byte(i));
    } else {
      for (uint64_t i = block.thread(); i < args.box_bytes / kPackBytes; i += block.threads()) {
        Pack pack;
        GAR_UNROLL for (int k = 0; k < kWords; ++k)
          pack.words[k] = pattern.word(i * kWords + uint64_t(k));
        store_lanes<uint64_t, kWords>(to, i, pack.lanes);
      }
    }
  }
  GAR_MEMBER bool check(const char* from, const ProbePattern& pattern, uint64_t fault, uint32_t round) {
    Wrong wrong = {0, 0, 0};
    bool found = false;
    if (pattern.by_bytes()) {
      for (uint64_t i = block.thread(); i < args.box_bytes && !found; i += block.threads()) {
        const uint8_t seen = uint8_t(from[i]);
        found = seen != pattern.byte(i);
        if (found) wrong = {i, pattern.byte(i), seen};
      }
    } else {
      for (uint64_t i = block.thread(); i < args.box_bytes / kPackBytes && !found; i += block.threads()) {
        Pack pack;
        pack.lanes = load_lanes<uint64_t, kWords>(from, i);
        GAR_UNROLL for (int k = 0; k < kWords; ++k) {
          const uint64_t at = i * kWords + uint64_t(k);
          if (found || pack.words[k] == pattern.word(at)) continue;
          found = true;
          wrong = {8 * at, pattern.word(at), pack.words[k]};
        }
      }
    }
    if (found && claim(word(rank, peer, kProbeClaim))) {
      GarProbeResult* mine = result(rank, peer);
      mine->round = round;
      mine->place = wrong.place;
      mine->expected = wrong.expected;
      mine->seen = wrong.seen;
    }
    return !block.sync_or(found) || end(fault);
  }

  // ---- keeping step: see NOTE probe ---------------------------------------------------------------------------
  GAR_MEMBER bool meet(uint64_t number, uint64_t limit_ns) {
    block.sync();
    bool met = true;
    if (block.thread() == 0) {
      store_release(&result(rank, peer)->meeting, number + 1);
      met = await(&result(peer, rank)->meeting, number + 1, limit_ns);
    }
    return !block.sync_or(!met) || end(kProbeLate);
  }
  // One thread waits until a word is at a value, or a step or two past it; false: too long, or the peer has ended.
  GAR_MEMBER bool await(const uint64_t* place, uint64_t value, uint64_t limit_ns) {
    const GarArgs no_call = {};  // nobody polls, and nothing is spun for
    Backoff backoff(no_call);
    const uint64_t start = clock_ns();
    for (;;) {
      if (load_acquire(place) - value < kProbeRounds) return true;
      if (!backoff.pause()) continue;
      const bool ended = load_acquire(&result(peer, rank)->code) > kProbeOk;
      if (ended || clock_ns() - start > limit_ns) return load_acquire(place) - value < kProbeRounds;
    }
  }
  // The last thing of a block. A wait that failed because the peer ended says nothing of this side.
  GAR_MEMBER bool end(uint64_t code) {
    block.sync();
    if (block.thread() == 0) {
      const bool wait_failed = code == kProbeNoStore || code == kProbeLate;
      const bool gave_up = wait_failed && load_acquire(&result(peer, rank)->code) > kProbeOk;
      store_release(&result(rank, peer)->code, gave_up ? kProbePeerEnded : code);
    }
    return code == kProbeOk;
  }
};

// One block for each GPU, and all GPUs at once.
GAR_DEVICE bool probe(const Block& block, const GarProbeArgs& args) {
  return block.index() == args.rank || ProbePair(block, args).run();
}

}  // namespace gar
