// Runs every kernel with ranks, blocks and block threads as OS threads, and exits with how it went.
// Knows nothing of which fault is being looked for: sanitizers, exact results and the kernels' own limits tell.
#include <pthread.h>

#include "rank.h"
//
#include "host.cpp"

namespace race {

// Threads that meet; ThreadSanitizer knows pthread's barrier.
struct Meeting : gar::BlockBarrier {
  pthread_barrier_t barrier;
  explicit Meeting(uint32_t threads) : gar::BlockBarrier{&Meeting::meet, false} {
    pthread_barrier_init(&barrier, nullptr, threads);
  }
  ~Meeting() { pthread_barrier_destroy(&barrier); }
  static void meet(gar::BlockBarrier* self) {
    shake();
    pthread_barrier_wait(&static_cast<Meeting*>(self)->barrier);
  }
};

// How the last rank behaves in an extra last call, in which all others must give up.
enum Ending { kNone, kAbsent, kStalls, kDiffers, kCloses, kAborts };

struct Run {
  const Options options;
  const World world;
  const Script script;
  const uint64_t timeout_ns;
  const Ending ending;
  std::vector<std::unique_ptr<Rank>> ranks;
  Meeting all_ranks;

  explicit Run(const Options& o)
      : options(o),
        world(o),
        script(o, world),
        timeout_ns(o.number("timeout_ms") * 1000000),
        ending(Ending(o.number("ending"))),
        all_ranks(world.nranks * world.max_channels * GAR_BLOCK_THREADS) {
    shake_period = o.number("shake");
    for (uint32_t rank = 0; rank < world.nranks; ++rank) ranks.emplace_back(new Rank(world, script, rank));
    world.preset_calls(o.number("preset"));
    for (const Region& region : script.regions) world.preset_steps(region, o.number("preset"));
  }
  [[noreturn]] void gave_up(const Call& call, uint32_t rank) const {
    for (uint32_t reporter = 0; reporter < world.nranks; ++reporter) {
      const GarReport* report = world.report(rank, reporter);
      const uint64_t code = gar::load_acquire(&report->code);
      if (code != 0)
        fprintf(stderr, "rank %u: code %llu word %llu step %llu peer %llu expected %llu seen %llu\n", reporter,
                (unsigned long long)code, (unsigned long long)report->word, (unsigned long long)report->step,
                (unsigned long long)report->peer, (unsigned long long)report->expected,
                (unsigned long long)report->seen);
    }
    fail(kGaveUp, "gave up: call %llu %s rank %u", (unsigned long long)call.number, call.row().name, rank);
  }
};

// The threads of one rank: blocks of the largest launch times threads of a block.
class RankThreads {
 public:
  RankThreads(Run& run, uint32_t rank)
      : run_(run), rank_(*run.ranks[rank]), all_(run.world.max_channels * GAR_BLOCK_THREADS) {
    for (uint32_t i = 0; i < run.world.max_channels; ++i) blocks_.emplace_back(new Meeting(GAR_BLOCK_THREADS));
    for (uint32_t i = 0; i < run.world.max_channels * GAR_BLOCK_THREADS; ++i)
      threads_.emplace_back([this, i] { serve(i); });
  }
  void join() {
    for (auto& thread : threads_) thread.join();
  }

 private:
  Run& run_;
  Rank& rank_;
  Meeting all_;
  std::vector<std::unique_ptr<Meeting>> blocks_;
  std::vector<std::thread> threads_;

  bool misbehaves() const { return rank_.rank + 1 == run_.world.nranks; }

  // Inputs are written and outputs read by the rank's own thread, with nothing but the call between: that is what a
  // user may do.
  void serve(uint32_t i) {
    shake_state = hash(run_.script.seed, rank_.rank, i);
    for (uint64_t number = 0; number < run_.script.calls; ++number) {
      const Call call = run_.script.draw(number);
      if (i == 0) rank_.prepare(call, run_.ranks, run_.timeout_ns);
      Meeting::meet(&all_);
      if (!call_kernel(call, i)) run_.gave_up(call, rank_.rank);
      Meeting::meet(&all_);
      if (i == 0) rank_.check(call);
    }
    if (run_.ending == kNone) return;
    Meeting::meet(&run_.all_ranks);  // whoever is a call behind may give up that one
    end(run_.script.draw(run_.script.calls), i);
  }
  bool call_kernel(const Call& call, uint32_t i) {
    const gar::Block block = {i / GAR_BLOCK_THREADS, call.nchannels, i % GAR_BLOCK_THREADS,
                              blocks_[i / GAR_BLOCK_THREADS].get()};
    return block.index() >= call.nchannels || call.row().kernel(&rank_.args, &block);
  }

  void end(Call call, uint32_t i) {
    call.nchannels = run_.world.max_channels;
    if (i == 0) {
      const bool by_time = run_.ending == kAbsent || run_.ending == kStalls;
      rank_.prepare(call, run_.ranks, by_time ? 100000000 : run_.timeout_ns);
      rank_.args.header.count += run_.ending == kDiffers && misbehaves();
    }
    Meeting::meet(&all_);
    if (run_.ending != kDiffers && misbehaves()) {
      misbehave(call, i);
    } else {
      const bool succeeded = call_kernel(call, i);
      if (succeeded) fail(kWrongResult, "wrong: a call succeeded that could not");
      if (post(call, i)) fail(kWrongResult, "wrong: a call was posted behind one that was given up");
    }
    Meeting::meet(&all_);
    if (i == 0 && (run_.ending == kDiffers || !misbehaves())) expect_report(call);
  }
  void misbehave(const Call& call, uint32_t i) {
    if (run_.ending == kCloses && i == 0) run_.world.tell(rank_.rank, gar::kClosed, false);
    if (run_.ending == kAborts && i == 0) run_.world.tell(rank_.rank, gar::kAborted, true);
    if (run_.ending == kStalls) post(call, i);
  }
  bool post(const Call& call, uint32_t i) {
    const gar::Block block = {i / GAR_BLOCK_THREADS, call.nchannels, i % GAR_BLOCK_THREADS,
                              blocks_[i / GAR_BLOCK_THREADS].get()};
    return gar::Channel(block, rank_.args).post_call();
  }
  // Whoever leaves finds in its own segment why, and no other reason.
  void expect_report(const Call& call) const {
    const uint64_t codes[] = {0, gar::kTimedOut, gar::kTimedOut, gar::kMismatch, gar::kClosed, gar::kAborted};
    const bool closer_reports = run_.ending != kCloses;
    bool found = false;
    for (uint32_t reporter = 0; reporter < run_.world.nranks - !closer_reports; ++reporter) {
      const GarReport* report = run_.world.report(rank_.rank, reporter);
      const uint64_t code = gar::load_acquire(&report->code);
      if (code == 0) continue;
      found = true;
      if (code != codes[run_.ending]) fail(kWrongResult, "wrong: rank %u reports code %d", reporter, int(code));
      if (code != gar::kAborted && report->mine.detail != call.number)
        fail(kWrongResult, "wrong: the report of rank %u is not whole", reporter);
    }
    if (!found) fail(kWrongResult, "wrong: rank %u does not know why it gave up", rank_.rank);
  }
};

void run_by_threads(Run& run) {
  std::vector<std::unique_ptr<RankThreads>> all;
  for (uint32_t rank = 0; rank < run.world.nranks; ++rank) all.emplace_back(new RankThreads(run, rank));
  for (auto& threads : all) threads->join();
}

// All ranks in one process, as Communicator(["host"] * nranks) runs them.
void run_by_workers(Run& run) {
  gar::Workers workers(true);
  for (uint64_t number = 0; number < run.script.calls; ++number) {
    const Call call = run.script.draw(number);
    std::vector<GarLaunch> launches;
    for (auto& rank : run.ranks) {
      rank->prepare(call, run.ranks, run.timeout_ns);
      launches.push_back({call.row().kernel, &rank->args, call.nchannels});
    }
    if (!workers.run(launches.data(), run.world.nranks)) run.gave_up(call, 0);
    for (auto& rank : run.ranks) rank->check(call);
  }
}

}  // namespace race

int main(int argc, char** argv) {
  race::Run run(race::Options{argc, argv});
  if (run.options.number("workers")) {
    race::run_by_workers(run);
  } else {
    race::run_by_threads(run);
  }
  printf("%llu calls\n", (unsigned long long)run.script.calls);
  return 0;
}
