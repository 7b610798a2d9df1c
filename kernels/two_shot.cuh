// Two-shot all-reduce: rank r folds slice r of everyone's data, then all ranks collect the folded slices.
//
//   staged:  stage slices -> set 0 | fold my slice -> output and set 1 | gather the others' slices <- set 1
//   direct:  meet | fold my slice of all inputs -> all outputs | meet          (arrays that peers can address)
//
// A rank sends 2(p-1)/p n bytes. The fold is in rank order. Knows nothing of how elements are encoded.
#pragma once

#include "one_shot.cuh"

namespace gar {

// Every rank's input or output at one offset, by the table of addresses; sources and targets of the direct fold.
template <class T, class Pointer>
struct FromTable {
  void* const* table;
  uint64_t at;
  GAR_MEMBER Pointer operator[](uint32_t k) const { return element<T>(table[k], at); }
};

// One round cuts nranks * chunk_count elements into a slice for every rank; a short last round too.
template <class T, class Op, int P>
struct TwoShot {
  enum { kOut = 0, kBack = 1 };  // sets of slots: data for the folding rank, folded slices
  const Channel& channel;
  const GarArgs& args;
  const Range range;

  GAR_MEMBER explicit TwoShot(const Channel& the_channel)
      : channel(the_channel),
        args(the_channel.args),
        range(part<typename Element<T>::Storage>({0, args.count}, channel.index, channel.block.count())) {}
  GAR_MEMBER uint64_t rounds() const { return rounds_of(range, args.chunk_count * channel.nranks); }
  GAR_MEMBER Range slice(uint64_t i, uint32_t owner) const {
    const Range round = piece(range, i, args.chunk_count * channel.nranks);
    return part<typename Element<T>::Storage>(round, owner, channel.nranks);
  }
  GAR_MEMBER uint32_t peer(uint32_t j) const { return (channel.rank + j) % channel.nranks; }

  GAR_MEMBER void stage(uint64_t i, uint64_t step) const {
    for (uint32_t j = 1; j < channel.nranks; ++j) {
      const Range s = slice(i, peer(j));
      copy<T>(channel.block, channel.slot(step, channel.rank, peer(j), kOut), element<T>(args.input, s.lo), s.n);
    }
  }
  GAR_MEMBER void reduce(uint64_t i, uint64_t step) const {
    const Range s = slice(i, channel.rank);
    const FromPrivate from{channel, step, element<T>(args.input, s.lo)};
    if (!args.push) {  // one copy serves all peers
      void* output = element<T>(args.output, s.lo);
      char* back = channel.shared_slot(step, channel.rank, channel.rank, kBack);
      if (args.streaming) {  // the slot is about to be read: only the output may pass the caches
        const Held<void*, 1> to{{back}};
        fold<T, Op, P, 1>(channel.block, from, to, ranks_of<P>(channel.nranks), s.n, false);
        channel.block.sync();
        copy<T>(channel.block, output, back, s.n, true);
        return;
      }
      const Held<void*, 2> to{{output, back}};
      fold<T, Op, P, 2>(channel.block, from, to, ranks_of<P>(channel.nranks), s.n, false);
      return;
    }
    const Back to{*this, step, element<T>(args.output, s.lo)};
    fold<T, Op, P, P>(channel.block, from, to, ranks_of<P>(channel.nranks), s.n, false);
  }
  GAR_MEMBER void gather(uint64_t i, uint64_t step) const {
    for (uint32_t j = 1; j < channel.nranks; ++j) {
      const Range s = slice(i, peer(j));
      copy<T>(channel.block, element<T>(args.output, s.lo), channel.shared_slot(step, peer(j), channel.rank, kBack),
              s.n, args.streaming);
    }
  }
  struct Back {
    const TwoShot& two_shot;
    uint64_t step;
    void* own;
    GAR_MEMBER void* operator[](uint32_t k) const {
      const Channel& channel = two_shot.channel;
      return k == channel.rank ? own : channel.shared_slot(step, channel.rank, k, kBack);
    }
  };
};

// NOTE two words a round. Each round is a step: set 0's `ready` says staged, set 1's says folded. In round i a rank
// stages i+1, folds i once all have staged it, and gathers i-1 once all have folded it: everything awaited was posted
// one round earlier, so ranks need not be in lockstep. When it stages i+1 it has seen that all folded i-2, so set 0's
// slot may hold i-3 or older; when it folds i it has seen that all staged i, which each did after gathering i-3, so
// set 1's slot may hold i-3 or older. Hence four slots suffice without credit. Rounds run on across calls, and a call
// ends with everything gathered.
template <class T, class Op, int P>
GAR_DEVICE bool two_shot(const Block& block, const GarArgs& args) {
  typedef TwoShot<T, Op, P> Shot;
  Channel channel(block, args);
  const Shot shot(channel);
  const uint64_t rounds = shot.rounds(), first = channel.first_step();
  shot.stage(0, first);
  if (!channel.post_call()) return false;
  for (uint64_t i = 0; i <= rounds; ++i) {
    if (i + 1 < rounds) {
      shot.stage(i + 1, first + i + 1);
      channel.post_ready_all(first + i + 1, Shot::kOut);
    }
    if (i < rounds) {
      if (!(i == 0 ? channel.await_call() : channel.await_ready_all(first + i, Shot::kOut))) return false;
      shot.reduce(i, first + i);
      channel.post_ready_all(first + i, Shot::kBack);
    }
    if (i > 0) {
      if (!channel.await_ready_all(first + i - 1, Shot::kBack)) return false;
      shot.gather(i - 1, first + i - 1);
    }
  }
  return channel.end(rounds);
}

// NOTE direct meets twice. Before the fold every input must be written (the call lines, posted by ranks whose inputs
// are ready); after it nobody may leave while a peer still reads its input or writes its output (the ready words).
// In between, slice r of every array is touched by rank r alone, so in-place calls are safe.
template <class T, class Op, int P>
GAR_DEVICE bool two_shot_direct(const Block& block, const GarArgs& args) {
  Channel channel(block, args);
  if (!channel.begin()) return false;
  typedef typename Element<T>::Storage S;
  const Range mine = part<S>(part<S>({0, args.count}, channel.rank, channel.nranks), channel.index, block.count());
  const FromTable<T, const void*> from{args.peer_inputs, mine.lo};
  const FromTable<T, void*> to{args.peer_outputs, mine.lo};
  fold<T, Op, P, P>(block, from, to, ranks_of<P>(channel.nranks), mine.n, args.streaming);
  channel.post_ready_all(channel.first_step());
  if (!channel.await_ready_all(channel.first_step())) return false;
  return channel.end(1);
}

}  // namespace gar
