// The synchronisation between ranks: a channel's flag words, the call header, steps, slots, waits that end.
// Knows nothing of elements, operators or the shape of an algorithm.
#pragma once

#include "platform.cuh"

namespace gar {

constexpr uint64_t kLineBytes = 128;  // one flag word per line: no two writers share a cache line
constexpr uint64_t kReportBytes = 256;
constexpr uint64_t kReportNs = 100000000;  // far more than a report takes to be written

enum : uint64_t { kTimedOut = 1, kMismatch = 2, kAborted = 3, kClosed = 4, kLost = 5 };  // GarReport::code
enum : uint64_t { kCall = 0, kReady = 1, kCredit = 2 };                                  // GarReport::word

// NOTE words. A word has one writer (a rank) and one reader (another rank) and only grows; it is compared by its
// signed distance, so it may wrap. `ready` s + 1 says: the data of step s are in the slot. `credit` s + 1 says: the
// data of step s have been read out of the slot. Steps are 64-bit, live in the segment and are never reset, so a
// captured launch can be replayed.
//
// NOTE release and acquire. Data are written, then block.sync(), then one thread stores the word with release at
// system scope: the barrier orders the data of the whole block before that store. A reader's thread loads the word
// with acquire, then block.sync(): after it, the whole block may read the data. Visibility is promised only through
// that chain, so no thread touches data on the strength of a word that another block's thread has read.
//
// NOTE call lines. In every call each rank posts its header to every other rank and waits for all of theirs. So when
// a rank has left call e, all ranks have entered e; nobody can be two calls ahead, and two lines by parity of the
// sequence suffice: the line that e + 2 overwrites was read in e, before its reader posted e + 1.
//
// NOTE aborts. A rank that gives up writes its report into every rank's control block, then sets every rank's abort
// word. Each wait looks at its own rank's abort word, so all ranks leave the call soon after the first one gave up. A
// rank that closes its communicator leaves a report with kClosed but sets no abort word, since its peers may still be
// finishing the last call; a wait for such a rank looks at the word once more (the report came after everything that
// the rank ever posted) and then gives up. Whoever learns that a rank's process is gone leaves kLost in its
// name and gives up: that rank cannot take part in what is being waited for. A call that was given up has not been
// counted, so launches that a GPU still has behind it must post nothing: they would do so under that call's number.
class Channel {
 public:
  const Block& block;
  const GarArgs& args;
  const uint32_t index, rank, nranks;

  GAR_MEMBER Channel(const Block& the_block, const GarArgs& the_args)
      : block(the_block), args(the_args), index(the_block.index()), rank(the_args.rank), nranks(the_args.nranks) {
    sequence_ = *line(rank, args.sequence_offset, index) + 1;
    first_step_ = *line(rank, args.steps_offset, index);
  }

  // Steps of this algorithm that earlier calls took on this channel.
  GAR_MEMBER uint64_t first_step() const { return first_step_; }

  // ---- slots --------------------------------------------------------------------------------------------------
  // Where `from` puts what only `to` reads in a step. Slots lie with the receiver (push) or the sender; `set` tells
  // apart the sets of slots of an algorithm that needs several.
  GAR_MEMBER char* slot(uint64_t step, uint32_t from, uint32_t to, uint32_t set = 0) const {
    return args.push ? slot_at(to, step, set, from) : slot_at(from, step, set, to);
  }
  // The same for what every rank reads: with the sender one copy serves all.
  GAR_MEMBER char* shared_slot(uint64_t step, uint32_t from, uint32_t to, uint32_t set = 0) const {
    return args.push ? slot_at(to, step, set, from) : slot_at(from, step, set, from);
  }

  // ---- the call: see NOTE call lines ----------------------------------------------------------------------------
  // False: give up the call; see NOTE aborts.
  GAR_MEMBER bool post_call() const {
    if (block.sync_or(block.thread() == 0 && load_acquire(abort_word(rank)) != 0)) return false;
    for (uint32_t to = block.thread(); to < nranks; to += block.threads()) {
      if (to == rank) continue;
      GarHeader* header = call_line(to, rank);
      header->count = args.header.count;
      header->signature = args.header.signature;
      header->geometry = args.header.geometry;
      header->detail = args.header.detail;
      store_release(&header->sequence, sequence_);
    }
    return true;
  }
  // False: give up the call (this block's threads all see the same).
  GAR_MEMBER bool await_call() {
    bool failed = false;
    for (uint32_t from = block.thread(); from < nranks && !failed; from += block.threads()) {
      if (from == rank) continue;
      const GarHeader* theirs = call_line(rank, from);
      failed = !wait(&theirs->sequence, sequence_, kCall, sequence_, from) || !agrees(*theirs, from);
    }
    return !block.sync_or(failed);
  }
  GAR_MEMBER bool begin() { return post_call() && await_call(); }
  // The last thing in a call that succeeds: `steps` is how many steps it took.
  GAR_MEMBER bool end(uint64_t steps) const {
    block.sync();
    if (block.thread() == 0) {
      *line(rank, args.sequence_offset, index) = sequence_;
      *line(rank, args.steps_offset, index) = first_step_ + steps;
    }
    return true;
  }

  // ---- ready and credit -----------------------------------------------------------------------------------------
  // Each set of slots has its own words.
  GAR_MEMBER void post_ready_all(uint64_t step, uint32_t set = 0) const {
    block.sync();
    for (uint32_t to = block.thread(); to < nranks; to += block.threads())
      if (to != rank) store_release(pair_line(to, args.ready_offset, set, rank), step + 1);
  }
  GAR_MEMBER bool await_ready_all(uint64_t step, uint32_t set = 0) {
    bool failed = false;
    for (uint32_t from = block.thread(); from < nranks && !failed; from += block.threads())
      if (from != rank) failed = !wait(pair_line(rank, args.ready_offset, set, from), step + 1, kReady, step, from);
    return !block.sync_or(failed);
  }
  // One thread's part of a step between two ranks; the caller brackets it with block.sync().
  GAR_MEMBER void post_ready(uint32_t to, uint64_t step, uint32_t set) const {
    store_release(pair_line(to, args.ready_offset, set, rank), step + 1);
  }
  GAR_MEMBER bool await_ready(uint32_t from, uint64_t step, uint32_t set) {
    return wait(pair_line(rank, args.ready_offset, set, from), step + 1, kReady, step, from);
  }
  GAR_MEMBER void post_credit(uint32_t to, uint64_t step, uint32_t set) const {
    store_release(pair_line(to, args.credit_offset, set, rank), step + 1);
  }
  // Waits until the slot of `step` is free: its last user, step - nslots, has been read.
  GAR_MEMBER bool await_credit(uint32_t from, uint64_t step, uint32_t set) {
    return wait(pair_line(rank, args.credit_offset, set, from), step + 1 - args.nslots, kCredit, step, from);
  }

 private:
  uint64_t sequence_, first_step_;

  GAR_MEMBER char* segment(uint32_t owner) const { return static_cast<char*>(args.segments[owner]); }
  GAR_MEMBER char* control(uint32_t owner) const { return static_cast<char*>(args.controls[owner]); }
  GAR_MEMBER uint64_t* line(uint32_t owner, uint64_t offset, uint64_t number) const {
    return reinterpret_cast<uint64_t*>(segment(owner) + offset + number * kLineBytes);
  }
  GAR_MEMBER uint64_t* pair_line(uint32_t owner, uint64_t offset, uint32_t set, uint32_t writer) const {
    return line(owner, offset, (uint64_t(index) * args.nsets + set) * nranks + writer);
  }
  GAR_MEMBER GarHeader* call_line(uint32_t owner, uint32_t writer) const {
    const uint64_t pair = (uint64_t(index) * 2 + (sequence_ & 1)) * nranks + writer;
    return reinterpret_cast<GarHeader*>(line(owner, args.calls_offset, pair));
  }
  GAR_MEMBER char* slot_at(uint32_t owner, uint64_t step, uint32_t set, uint32_t other) const {
    const uint64_t position = uint64_t(index) * args.nslots + (step & (args.nslots - 1));
    const uint32_t link = args.nlinks == 1 ? 0 : other;
    return segment(owner) + args.slots_offset + ((position * args.nsets + set) * args.nlinks + link) * args.slot_bytes;
  }

  // Every wait of every kernel.
  GAR_MEMBER bool wait(const uint64_t* word, uint64_t want, uint64_t kind, uint64_t step, uint32_t peer) {
    const uint64_t seen = load_acquire(word);
    return int64_t(seen - want) >= 0 || wait_longer(word, want, kind, step, peer);
  }
  GAR_NOINLINE bool wait_longer(const uint64_t* word, uint64_t want, uint64_t kind, uint64_t step, uint32_t peer) {
    Backoff backoff(args);
    uint64_t start = 0;
    for (;;) {
      const uint64_t seen = load_acquire(word);
      if (int64_t(seen - want) >= 0) return true;
      if (!backoff.pause()) continue;
      // Whoever gave up had posted everything of its earlier calls: a wait for that rank can still end well.
      if (load_acquire(abort_word(rank)) != 0) return int64_t(load_acquire(word) - want) >= 0;
      const uint64_t now = clock_ns();
      if (start == 0) start = now;
      const uint64_t fate = load_acquire(&report_of(rank, peer)->code);
      const bool closed = fate == kClosed || fate == kLost;
      if (closed && int64_t(load_acquire(word) - want) >= 0) return true;
      const int verdict = backoff.interrupted(args);
      if (!closed && verdict == 0 && (args.timeout_ns == 0 || now - start <= args.timeout_ns)) continue;
      GarReport report = {};
      report.code = closed ? fate : verdict > 1 ? kLost : verdict == 1 ? kAborted : kTimedOut;
      if (verdict > 1) peer = uint32_t(verdict) - 2;
      report.word = kind;
      report.step = step;
      report.peer = peer;
      report.expected = want;
      report.seen = seen;
      report.elapsed_ns = now - start;
      give_up(report);
      return false;
    }
  }

  GAR_MEMBER bool agrees(const GarHeader& theirs, uint32_t peer) {
    const GarHeader& mine = args.header;
    if (theirs.count == mine.count && theirs.signature == mine.signature && theirs.geometry == mine.geometry &&
        theirs.detail == mine.detail)
      return true;
    GarReport report = {};
    report.code = kMismatch;
    report.step = sequence_;
    report.peer = peer;
    report.expected = report.seen = sequence_;
    report.theirs = theirs;
    give_up(report);
    return false;
  }

  GAR_MEMBER uint64_t* abort_word(uint32_t owner) const {
    return reinterpret_cast<uint64_t*>(control(owner) + args.abort_offset);
  }
  GAR_MEMBER GarReport* report_of(uint32_t owner, uint32_t reporter) const {
    return reinterpret_cast<GarReport*>(control(owner) + args.reports_offset + reporter * kReportBytes);
  }
  // See NOTE aborts. Several threads and blocks may get here, and the host; the first one reports. The others leave no
  // call before the word says so: whatever comes behind it looks there. A rank's own kClosed sets no word.
  GAR_NOINLINE void give_up(GarReport& report) {
    if (!claim(abort_word(rank) + 1)) {
      for (const uint64_t start = clock_ns(); clock_ns() - start < kReportNs;)
        if (load_acquire(abort_word(rank)) != 0) return;
      return store_release(abort_word(rank), rank + 1);
    }
    report.channel = index;
    report.mine = args.header;
    report.mine.sequence = sequence_;
    for (uint32_t to = 0; to < nranks; ++to) {
      // All words but the code: peers that wait for this rank are looking at that one.
      uint64_t* theirs = reinterpret_cast<uint64_t*>(report_of(to, rank));
      const uint64_t* ours = reinterpret_cast<const uint64_t*>(&report);
      GAR_UNROLL for (uint64_t i = 1; i < sizeof(GarReport) / sizeof(uint64_t); ++i)
        theirs[i] = ours[i];
      store_release(theirs, report.code);
      store_release(abort_word(to), rank + 1);
    }
  }
};

// Elements [lo, lo + n) of an array.
struct Range {
  uint64_t lo, n;
};
// Part `index` of `parts` of a range, cut on multiples of 128 bytes so that parts share no cache line.
template <class T>
GAR_DEVICE Range part(Range whole, uint64_t index, uint64_t parts) {
  constexpr uint64_t kGrain = sizeof(T) >= kLineBytes ? 1 : kLineBytes / sizeof(T);
  const uint64_t each = ((whole.n + parts - 1) / parts + kGrain - 1) / kGrain * kGrain;
  const uint64_t lo = index * each < whole.n ? index * each : whole.n;
  const uint64_t hi = lo + each < whole.n ? lo + each : whole.n;
  return {whole.lo + lo, hi - lo};
}
// Piece `i` of a range cut every `chunk` elements; empty past the end.
GAR_DEVICE Range piece(Range whole, uint64_t i, uint64_t chunk) {
  const uint64_t lo = i * chunk < whole.n ? i * chunk : whole.n;
  const uint64_t hi = lo + chunk < whole.n ? lo + chunk : whole.n;
  return {whole.lo + lo, hi - lo};
}
// Steps that a range takes: an empty one still takes one, so that every rank meets every other in every call.
GAR_DEVICE uint64_t rounds_of(Range whole, uint64_t chunk) { return whole.n == 0 ? 1 : (whole.n + chunk - 1) / chunk; }

}  // namespace gar
