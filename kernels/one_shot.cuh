// One-shot all-reduce and its relatives: every rank hands its data to its peers directly, and each combines what it
// got.
//
//   step s:   stage s+1 -> slots | post ready s+1 | await ready s from all | combine s from slots
//
// A rank sends (p-1) n bytes for all-reduce (n once where slots lie with the sender). The fold is in rank order.
// Knows nothing of flags beyond primitives.cuh, nor of how elements are encoded.
#pragma once

#include "pack.cuh"
#include "primitives.cuh"

namespace gar {

// NOTE slots without credit. A rank stages step s+1 before it awaits step s, and posts ready s+1 only after it has
// combined step s-1. So when it has seen everyone's ready s-1 (before staging s+1), all ranks have combined step s-3,
// and with four slots or more the slot of s+1 holds nothing unread. Steps run on across calls, and every collective of
// this file takes part in every step, so this holds between calls too. (The first ready of a call is its call line.)
template <class Collective>
GAR_DEVICE bool exchange(const Block& block, const GarArgs& args) {
  Channel channel(block, args);
  const Collective collective(channel);
  const uint64_t rounds = collective.rounds(), first = channel.first_step();
  collective.stage(0, first);
  if (!channel.post_call()) return false;
  for (uint64_t i = 0; i < rounds; ++i) {
    if (i + 1 < rounds) {
      collective.stage(i + 1, first + i + 1);
      channel.post_ready_all(first + i + 1);
    }
    if (!(i == 0 ? channel.await_call() : channel.await_ready_all(first + i))) return false;
    collective.combine(i, first + i);
  }
  return channel.end(rounds);
}

// What the collectives of this file share: this channel's part of the elements, cut into chunks.
template <class T>
struct Exchange {
  const Channel& channel;
  const GarArgs& args;
  const Range range;

  GAR_MEMBER Exchange(const Channel& the_channel, uint64_t count)
      : channel(the_channel),
        args(the_channel.args),
        range(part<typename Element<T>::Storage>({0, count}, the_channel.index, the_channel.block.count())) {}
  GAR_MEMBER uint64_t rounds() const { return rounds_of(range, args.chunk_count); }
  GAR_MEMBER Range chunk(uint64_t i) const { return piece(range, i, args.chunk_count); }
  GAR_MEMBER const void* input(uint64_t at) const { return element<T>(args.input, at); }
  GAR_MEMBER void* output(uint64_t at) const { return element<T>(args.output, at); }

  // Hands a chunk of the input to every peer.
  GAR_MEMBER void stage_for_all(uint64_t i, uint64_t step) const {
    const Range c = chunk(i);
    if (!args.push) {
      copy<T>(channel.block, channel.shared_slot(step, channel.rank, channel.rank), input(c.lo), c.n);
      return;
    }
    for (uint32_t j = 1; j < channel.nranks; ++j) {
      const uint32_t to = (channel.rank + j) % channel.nranks;
      copy<T>(channel.block, channel.shared_slot(step, channel.rank, to), input(c.lo), c.n);
    }
  }
};

// Every rank's data for a step: its own from the input, the others' from their slots.
struct FromShared {
  const Channel& channel;
  uint64_t step;
  const void* own;
  GAR_MEMBER const void* operator[](uint32_t k) const {
    return k == channel.rank ? own : channel.shared_slot(step, k, channel.rank);
  }
};
struct FromPrivate {
  const Channel& channel;
  uint64_t step;
  const void* own;
  GAR_MEMBER const void* operator[](uint32_t k) const {
    return k == channel.rank ? own : channel.slot(step, k, channel.rank);
  }
};

template <class T, class Op, int P>
struct OneShot : Exchange<T> {
  GAR_MEMBER explicit OneShot(const Channel& channel) : Exchange<T>(channel, channel.args.count) {}
  GAR_MEMBER void stage(uint64_t i, uint64_t step) const { this->stage_for_all(i, step); }
  GAR_MEMBER void combine(uint64_t i, uint64_t step) const {
    const Range c = this->chunk(i);
    const FromShared from{this->channel, step, this->input(c.lo)};
    const Held<void*, 1> to{{this->output(c.lo)}};
    fold<T, Op, P, 1>(this->channel.block, from, to, ranks_of<P>(this->channel.nranks), c.n, this->args.streaming);
  }
};

// reduce: only the root reads and folds.
template <class T, class Op, int P>
struct Reduce : Exchange<T> {
  GAR_MEMBER explicit Reduce(const Channel& channel) : Exchange<T>(channel, channel.args.count) {}
  GAR_MEMBER bool is_root() const { return this->channel.rank == this->args.root; }
  GAR_MEMBER void stage(uint64_t i, uint64_t step) const {
    if (is_root()) return;
    const Range c = this->chunk(i);
    copy<T>(this->channel.block, this->channel.slot(step, this->channel.rank, this->args.root), this->input(c.lo), c.n);
  }
  GAR_MEMBER void combine(uint64_t i, uint64_t step) const {
    if (!is_root()) return;
    const Range c = this->chunk(i);
    const FromPrivate from{this->channel, step, this->input(c.lo)};
    const Held<void*, 1> to{{this->output(c.lo)}};
    fold<T, Op, P, 1>(this->channel.block, from, to, ranks_of<P>(this->channel.nranks), c.n, this->args.streaming);
  }
};

// reduce_scatter: the input holds a block of `count` elements for every rank, in rank order.
template <class T, class Op, int P>
struct ReduceScatter : Exchange<T> {
  GAR_MEMBER explicit ReduceScatter(const Channel& channel) : Exchange<T>(channel, channel.args.count) {}
  GAR_MEMBER const void* block_of(uint32_t to, uint64_t at) const { return this->input(to * this->args.count + at); }
  GAR_MEMBER void stage(uint64_t i, uint64_t step) const {
    const Channel& channel = this->channel;
    const Range c = this->chunk(i);
    for (uint32_t j = 1; j < channel.nranks; ++j) {
      const uint32_t to = (channel.rank + j) % channel.nranks;
      copy<T>(channel.block, channel.slot(step, channel.rank, to), block_of(to, c.lo), c.n);
    }
  }
  GAR_MEMBER void combine(uint64_t i, uint64_t step) const {
    const Range c = this->chunk(i);
    const FromPrivate from{this->channel, step, block_of(this->channel.rank, c.lo)};
    const Held<void*, 1> to{{this->output(c.lo)}};
    fold<T, Op, P, 1>(this->channel.block, from, to, ranks_of<P>(this->channel.nranks), c.n, this->args.streaming);
  }
};

// all_gather: the output holds a block of `count` elements of every rank, in rank order.
template <class T>
struct AllGather : Exchange<T> {
  GAR_MEMBER explicit AllGather(const Channel& channel) : Exchange<T>(channel, channel.args.count) {}
  GAR_MEMBER void stage(uint64_t i, uint64_t step) const { this->stage_for_all(i, step); }
  GAR_MEMBER void combine(uint64_t i, uint64_t step) const {
    const Range c = this->chunk(i);
    const FromShared from{this->channel, step, this->input(c.lo)};
    for (uint32_t k = 0; k < this->channel.nranks; ++k) {
      void* to = this->output(k * this->args.count + c.lo);
      if (to != from[k]) copy<T>(this->channel.block, to, from[k], c.n, this->args.streaming);
    }
  }
};

// broadcast: the root's input becomes every rank's output.
template <class T>
struct Broadcast : Exchange<T> {
  GAR_MEMBER explicit Broadcast(const Channel& channel) : Exchange<T>(channel, channel.args.count) {}
  GAR_MEMBER void stage(uint64_t i, uint64_t step) const {
    if (this->channel.rank == this->args.root) this->stage_for_all(i, step);
  }
  GAR_MEMBER void combine(uint64_t i, uint64_t step) const {
    const Range c = this->chunk(i);
    const FromShared from{this->channel, step, this->input(c.lo)};
    const void* source = from[this->args.root];
    if (this->output(c.lo) != source)
      copy<T>(this->channel.block, this->output(c.lo), source, c.n, this->args.streaming);
  }
};

}  // namespace gar
