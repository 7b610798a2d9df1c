// What the host and a kernel say to each other: the argument struct, call header and failure report.
// Mirrored in gpuallreduce/args.py; tests/test_args.py compares both sides field by field.
#pragma once

// What every rank must agree on in a call. Exchanged at the start of each call and compared.
struct GarHeader {
  uint64_t sequence;   // number of this call on its channel, from 1
  uint64_t count;      // elements
  uint64_t signature;  // collective, dtype, operator, order, algorithm, access, root
  uint64_t geometry;   // chunk and channels
  uint64_t detail;     // memory layout, offsets in symmetric buffers, parts of a fused call
};

// Why a rank gave up. Lies in the control block of every rank, one per reporting rank.
struct GarReport {
  uint64_t code;  // 0 none, 1 timed out, 2 mismatch, 3 aborted, 4 closed, 5 lost; stored last, with release
  uint64_t word;  // what was waited for: 0 call, 1 ready, 2 credit
  uint64_t channel;
  uint64_t step;      // the call's sequence number where word is call
  uint64_t peer;      // the rank waited for, or whose header differs
  uint64_t expected;  // value waited for
  uint64_t seen;      // last value seen
  uint64_t elapsed_ns;
  GarHeader mine;    // of the reporting rank
  GarHeader theirs;  // of the peer; meaningful for a mismatch
};

// Asked every few milliseconds of waiting on host devices: 0 waits on, 1 gives up (an interrupt came), 2 + r gives up
// because the process of rank r has ended.
typedef int (*GarPoll)(void* context);

// Addresses by rank. Where tables travel by value they lie among a kernel's parameters, which GPUs read as constants;
// else they are the caller's, and stay valid for the length of the call.
namespace gar {
constexpr int kTableRanks = 72;  // GPUs of the largest NVLink domain (GB200 NVL72)
}
#if defined(GAR_TABLES_BY_VALUE)
typedef void* GarTable[gar::kTableRanks];
#else
typedef void* const* GarTable;
#endif

// One launch on one rank. Offsets are bytes from the start of any rank's segment or control block: they are alike.
struct GarArgs {
  const void* input;         // [count] elements of this rank; shard_gather: its shard
  void* output;              // may equal input, overlaps it in no other way; shard_reduce: this rank's shard
  const void* seed;          // shard_reduce: accumulators that this rank's shard is folded onto; may be null
  GarTable segments;         // [nranks] every rank's segment, as addressed from this rank
  GarTable controls;         // [nranks] every rank's control block: memory that the host reads and writes meanwhile
  GarTable peer_inputs;      // [nranks] every rank's input, direct access only
  GarTable peer_outputs;     // [nranks] every rank's output, direct access only
  uint64_t count;            // elements of the whole array
  uint64_t chunk_count;      // elements of one chunk; a chunk fits a slot
  uint64_t slot_bytes;       // from one slot to the next
  uint64_t abort_offset;     // control: a word, nonzero once some rank has given up
  uint64_t reports_offset;   // control: [nranks] reports, kReportBytes apart
  uint64_t calls_offset;     // [nchannels][2][nranks] lines: sequence and header of each rank's call
  uint64_t sequence_offset;  // [nchannels] lines: calls made so far
  uint64_t steps_offset;     // [nchannels] lines: steps taken so far, of this algorithm
  uint64_t ready_offset;     // [nchannels][nsets][nranks] lines, this algorithm's
  uint64_t credit_offset;    // [nchannels][nsets][nranks] lines, this algorithm's
  uint64_t slots_offset;     // this algorithm's slots
  uint64_t timeout_ns;       // limit of one wait; 0 waits for ever
  GarPoll poll;              // host devices; may be null
  void* poll_context;
  GarHeader header;  // sequence is filled in by the kernel
  uint32_t rank;
  uint32_t nranks;
  uint32_t root;        // broadcast and reduce
  uint32_t nsets;       // sets of slots: 2 where an algorithm sends and returns
  uint32_t nlinks;      // slots side by side in a set: one per peer, or 1 where only one peer ever uses them
  uint32_t nslots;      // a power of two, so that step % nslots survives the wrap of step
  uint32_t spin;        // host devices: pauses before the first yield
  uint32_t streaming;   // host devices: store the output past the caches
  uint32_t push;        // slots lie with the receiver (else with the sender)
  uint32_t nshards;     // shards of the array: one for each of the first ranks
  uint32_t fold_ranks;  // ranks that a shard has been folded over in the end: what avg divides by
  uint32_t reserved;    // zero; makes the padding visible
};

// A copy between two arrays of one shape on one GPU. Strides are bytes and may be negative.
namespace gar {
constexpr int kMaxAxes = 8;
}
struct GarStridedArgs {
  void* target;
  const void* source;
  uint64_t count;  // elements
  uint64_t naxes;  // from the slowest to the fastest
  uint64_t shape[gar::kMaxAxes];
  int64_t target_strides[gar::kMaxAxes];
  int64_t source_strides[gar::kMaxAxes];
};

// What a GPU found out about another in a probe of peer access; lies in host memory, 128 bytes apart.
namespace gar {
enum : uint64_t {
  kProbeIdle = 0,  // the kernel has not come to an end
  kProbeOk = 1,
  kProbeLate = 2,        // the peer's kernel did not come to a meeting
  kProbeNoStore = 3,     // the peer's stores did not arrive
  kProbeWrongStore = 4,  // what arrived is not what the peer stored
  kProbeWrongLoad = 5,   // what was loaded from the peer is not what lies there
  kProbePeerEnded = 6,   // the peer found a fault
};
}
struct GarProbeResult {
  uint64_t code;     // stored last, with release
  uint64_t meeting;  // meetings that it has come to
  uint64_t round;    // of a wrong word, and the three below
  uint64_t place;    // in bytes
  uint64_t expected;
  uint64_t seen;
};

// A probe of peer access on one GPU.
struct GarProbeArgs {
  void* areas[gar::kTableRanks];    // every GPU's area, as addressed from this one; zeros
  void* results[gar::kTableRanks];  // every GPU's results, one for each peer; zeros
  uint64_t nonce;                   // another one for every probe, and never near zero
  uint64_t box_bytes;
  uint64_t limit_ns;  // of one wait
  uint64_t start_ns;  // until all kernels run
  uint64_t rank;
};

// A copy by one GPU between any memory that it addresses.
struct GarCopyArgs {
  void* target;
  const void* source;
  uint64_t nbytes;
};

// The first word that is not what it should be.
struct GarWrongWord {
  uint64_t found;  // nonzero if there is one
  uint64_t index;
  uint64_t seen;
  uint64_t expected;
};

// Words that say by their values where they belong.
struct GarPatternArgs {
  uint64_t* words;
  uint64_t count;
  uint64_t seed;        // another one gives other values everywhere
  GarWrongWord* wrong;  // of a check
};

// Keeps a stream from going on until the host says so.
struct GarHoldArgs {
  const uint64_t* released;  // host memory, nonzero once it may go on
  uint64_t* expired;         // host memory, set once it went on without that
  uint64_t limit_ns;
};

// Loads each of which needs the one before: every word at an address is the next address.
struct GarChaseArgs {
  const void* first;
  const void** last;  // where it came to
  uint64_t accesses;
};

// One GPU's part in a call of several nodes, beside the data. Words are pinned host memory, one to a line, written by
// this GPU alone.
namespace gar {
enum : uint64_t {
  kNodesBegun = 0,     // calls that all ranks of the node have entered
  kNodesMet = 1,       // calls that the neighbouring nodes have been seen to make too
  kNodesFolded = 2,    // chunks of the present call that the node has folded
  kNodesGathered = 3,  // chunks of it that are finished
  kNodesEnded = 4,     // calls that have ended
  kNodesDiffers = 5,   // 1 + the neighbour whose call differs
  kNodesHalted = 6,    // nonzero once the host ends messages; 2 when it has
  kNodesMeeting = 7,   // steps of meetings of all ranks in the engine: odd while one is under way
};
}
struct GarNodesArgs {
  GarHeader header;         // of this call; its sequence is filled in by the kernel
  GarHeader* mine;          // what the neighbours are sent
  const GarHeader* theirs;  // [2] what the neighbours sent: the node before, and the one behind
  GarHeader* seen;          // [3] in host memory: theirs, once one of them differs, and mine
  uint64_t* words;
  const uint64_t* abort;  // nonzero once a rank of this node gave up
  uint64_t limit_ns;      // how long the host is waited for, which ends messages then
  uint64_t neighbours;    // bit 0: there is a node before; bit 1: one behind
  uint64_t word;          // which one a tick advances
};
