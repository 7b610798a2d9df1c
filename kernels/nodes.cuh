// What one GPU does in a call of several nodes beside folding and gathering: says which call it makes, compares it with
// the neighbouring nodes' calls, and tells the host how far it has come. Each kernel is one thread.
// Knows nothing of elements, nor of how messages travel between nodes.
#pragma once

#include "primitives.cuh"

namespace gar {

GAR_DEVICE uint64_t* nodes_word(const GarNodesArgs& args, uint64_t number) {
  return args.words + number * (kLineBytes / sizeof(uint64_t));
}
GAR_DEVICE void advance(const GarNodesArgs& args, uint64_t number) {
  uint64_t* word = nodes_word(args, number);
  store_release(word, load_acquire(word) + 1);
}

// NOTE halts. A call that was given up leaves garbage behind, and the stream goes on: the kernels behind it leave at
// once, and the messages behind those would be sent. So behind each kernel that ranks of a node do together comes one
// that looks, and lets nothing follow until the host has ended all messages. What is sent is right, or is not sent. The
// host says before the first one that it ends them, since what it ends leaves garbage behind as well.
GAR_DEVICE bool halt(const GarNodesArgs& args) {
  const GarArgs no_call = {};  // nobody polls, and nothing is spun for
  Backoff backoff(no_call);
  const uint64_t start = clock_ns();
  while (load_acquire(nodes_word(args, kNodesHalted)) < 2 && clock_ns() - start < args.limit_ns) backoff.pause();
  return false;
}
GAR_DEVICE bool goes_on(const GarNodesArgs& args) {
  const bool given_up = load_acquire(args.abort) != 0 || load_acquire(nodes_word(args, kNodesHalted)) != 0;
  return !given_up || halt(args);
}

// Writes this call's header for the neighbours. Counting on the GPU numbers the launches of a graph too.
GAR_DEVICE bool post_call(const Block&, const GarNodesArgs& args) {
  if (!goes_on(args)) return false;
  const uint64_t number = load_acquire(nodes_word(args, kNodesBegun)) + 1;
  *args.mine = args.header;
  args.mine->sequence = number;
  store_release(nodes_word(args, kNodesFolded), 0);
  store_release(nodes_word(args, kNodesGathered), 0);
  store_release(nodes_word(args, kNodesBegun), number);
  return true;
}

GAR_DEVICE bool same_call(const GarHeader& a, const GarHeader& b) {
  return a.sequence == b.sequence && a.count == b.count && a.signature == b.signature && a.geometry == b.geometry &&
         a.detail == b.detail;
}

// Messages of calls that differ would not fit each other.
GAR_DEVICE bool check_call(const Block&, const GarNodesArgs& args) {
  for (uint64_t k = 0; k < 2; ++k) {
    if (!(args.neighbours >> k & 1) || same_call(*args.mine, args.theirs[k])) continue;
    args.seen[k] = args.theirs[k];
    args.seen[2] = *args.mine;
    store_release(nodes_word(args, kNodesDiffers), k + 1);
    return halt(args);
  }
  advance(args, kNodesMet);
  return true;
}

GAR_DEVICE bool tick(const Block&, const GarNodesArgs& args) {
  if (!goes_on(args)) return false;
  advance(args, args.word);
  return true;
}

}  // namespace gar
