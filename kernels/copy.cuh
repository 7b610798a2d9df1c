// What bandwidth is measured with: copies, patterns to verify them by, holding a stream, chasing pointers.
// Knows nothing of ranks: each kernel is one GPU's own work, and whose memory it touches is the caller's business.
#pragma once

#include "pack.cuh"

namespace gar {

// Packs that a thread loads before it stores the first; alike on all targets, so that all run the same loops.
constexpr int kPacksTogether = 8;

// All blocks together, neighbouring threads side by side: whole packs, kPacksTogether of them at a time, then what is
// left byte by byte. A GPU that pulls and one that pushes run the same code.
GAR_DEVICE bool copy_bytes(const Block& block, const GarCopyArgs& args) {
  typedef uint32_t W;
  constexpr int N = kPackBytes / int(sizeof(W));
  const Held<const void*, 1> from{{args.source}};
  const Held<void*, 1> to{{args.target}};
  const uint64_t threads = block.threads(), all = threads * block.count();
  const uint64_t mine = block.index() * threads + block.thread();
  const uint64_t packs = args.nbytes / kPackBytes, tile = threads * kPacksTogether, tiled = packs - packs % tile;
  for (uint64_t i = block.index() * tile + block.thread(); i < tiled; i += tile * block.count())
    fold_packs<W, Sum, 1, 1, N, kPacksTogether, false>(from, to, 1, i, threads);
  for (uint64_t i = tiled + mine; i < packs; i += all) fold_packs<W, Sum, 1, 1, N, 1, false>(from, to, 1, i, 0);
  for (uint64_t i = packs * kPackBytes + mine; i < args.nbytes; i += all)
    fold_packs<uint8_t, Sum, 1, 1, 1, 1, false>(from, to, 1, i, 0);
  return true;
}

// Each index gives another value, and each seed others; neither is found by adding to the other.
GAR_DEVICE uint64_t pattern_word(uint64_t seed, uint64_t index) {
  uint64_t x = (index + 1) * 0x9e3779b97f4a7c15u ^ seed * 0xd1342543de82ef95u;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
  return x ^ (x >> 32);
}

GAR_DEVICE bool write_pattern(const Block& block, const GarPatternArgs& args) {
  const uint64_t all = uint64_t(block.count()) * block.threads();
  for (uint64_t i = uint64_t(block.index()) * block.threads() + block.thread(); i < args.count; i += all)
    args.words[i] = pattern_word(args.seed, i);
  return true;
}

GAR_DEVICE bool check_pattern(const Block& block, const GarPatternArgs& args) {
  const uint64_t all = uint64_t(block.count()) * block.threads();
  for (uint64_t i = uint64_t(block.index()) * block.threads() + block.thread(); i < args.count; i += all) {
    const uint64_t seen = args.words[i], expected = pattern_word(args.seed, i);
    if (seen == expected) continue;
    if (claim(&args.wrong->found)) {
      args.wrong->index = i;
      args.wrong->seen = seen;
      args.wrong->expected = expected;
    }
    break;
  }
  return true;
}

// One thread. Never waits beyond its limit, so a host that dies or waits for this stream itself hangs nothing.
GAR_DEVICE bool hold(const Block&, const GarHoldArgs& args) {
  const uint64_t begin = clock_ns();
  const GarArgs none{};
  Backoff backoff(none);
  while (load_acquire(args.released) == 0) {
    if (!backoff.pause()) continue;
    if (clock_ns() - begin > args.limit_ns) {
      store_release(args.expired, 1);
      break;
    }
  }
  return true;
}

// One thread.
GAR_DEVICE bool chase(const Block&, const GarChaseArgs& args) {
  const void* at = args.first;
  for (uint64_t i = 0; i < args.accesses; ++i) at = *static_cast<const void* const*>(at);
  *args.last = at;
  return true;
}

}  // namespace gar
