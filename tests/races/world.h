// The memory of all ranks of a race test: segments laid out by the numbers of gpuallreduce/memory.py.
// Knows nothing of elements or calls.
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "shake.h"
//
#include "primitives.cuh"

namespace race {

// Exit statuses; the Python side names them.
enum { kGaveUp = 2, kWrongResult = 3, kUsage = 4 };

template <class... Values>
[[noreturn]] void fail(int status, const char* format, Values... values) {
  fprintf(stderr, format, values...);
  fputc('\n', stderr);
  _exit(status);
}

// key=value arguments.
struct Options {
  int argc;
  char** argv;
  const char* text(const char* key) const {
    const size_t length = strlen(key);
    for (int i = 1; i < argc; ++i)
      if (strncmp(argv[i], key, length) == 0 && argv[i][length] == '=') return argv[i] + length + 1;
    fail(kUsage, "missing argument %s=", key);
  }
  uint64_t number(const char* key) const { return strtoull(text(key), nullptr, 0); }
  // Numbers with commas between.
  std::vector<uint64_t> numbers(const char* key) const {
    std::vector<uint64_t> values;
    for (char* at = const_cast<char*>(text(key));; ++at) {
      values.push_back(strtoull(at, &at, 0));
      if (*at != ',') return values;
    }
  }
};

struct Region {
  uint64_t steps, ready, credit, slots, nlinks, nsets, nslots, slot_bytes;
};

struct World {
  const uint32_t nranks, max_channels;
  const uint64_t abort, reports, sequence, calls, nbytes;
  std::vector<void*> segments;

  explicit World(const Options& o)
      : nranks(uint32_t(o.number("nranks"))),
        max_channels(uint32_t(o.number("max_channels"))),
        abort(o.number("abort")),
        reports(o.number("reports")),
        sequence(o.number("sequence")),
        calls(o.number("calls")),
        nbytes(o.number("nbytes")) {
    for (uint32_t rank = 0; rank < nranks; ++rank) {
      segments.push_back(aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096));
      memset(segments.back(), 0, nbytes);
    }
  }
  ~World() {
    for (void* segment : segments) free(segment);
  }
  World(const World&) = delete;

  static Region region(const Options& o, const char* name) {
    const auto field = [&](const char* key) {
      char full[64];
      snprintf(full, sizeof full, "%s.%s", name, key);
      return o.number(full);
    };
    return {field("steps"),  field("ready"), field("credit"), field("slots"),
            field("nlinks"), field("nsets"), field("nslots"), field("slot_bytes")};
  }

  uint64_t* word(uint32_t owner, uint64_t offset) const {
    return reinterpret_cast<uint64_t*>(static_cast<char*>(segments[owner]) + offset);
  }
  GarReport* report(uint32_t owner, uint32_t reporter) const {
    return reinterpret_cast<GarReport*>(word(owner, reports + reporter * gar::kReportBytes));
  }
  void preset(uint64_t offset, uint64_t lines, uint64_t value) const {
    for (uint32_t owner = 0; owner < nranks; ++owner)
      for (uint64_t i = 0; i < lines; ++i) *word(owner, offset + i * gar::kLineBytes) = value;
  }
  // As if so many calls had been made.
  void preset_calls(uint64_t value) const {
    preset(sequence, max_channels, value);
    preset(calls, uint64_t(max_channels) * 2 * nranks, value);
  }
  // As if so many steps had been taken.
  void preset_steps(const Region& region, uint64_t value) const {
    const uint64_t pairs = max_channels * region.nsets * nranks;
    preset(region.steps, max_channels, value);
    preset(region.ready, pairs, value);
    preset(region.credit, pairs, value);
  }
  // What a rank's host does to abort a call (abort) or when it closes its communicator.
  void tell(uint32_t rank, uint64_t code, bool aborts) const {
    for (uint32_t owner = 0; owner < nranks; ++owner) {
      gar::store_release(&report(owner, rank)->code, code);
      if (aborts) gar::store_release(word(owner, abort), rank + 1);
    }
  }
};

}  // namespace race
