// How streams run: one thread each, first in first out, with the rules of the legacy default stream.
// Knows nothing of handles or of what operations do.
#include <time.h>
#include <unistd.h>

#include "driver_capture.h"
#include "driver_faults.h"
#include "driver_streams.h"
#include "driver_workers.h"

namespace emulated {

int64_t clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

void delay(std::mt19937_64& random) {
  const Settings& settings = state().settings;
  if (settings.seed == 0 || settings.delay_us == 0) return;
  usleep(unsigned(random() % (settings.delay_us + 1)));
}

bool is_done(const DonePtr& done) { return done == nullptr || done->done; }

void wait_for(Lock& lock, const DonePtr& done) {
  if (done == nullptr) return;
  const DonePtr kept = done;
  kept->changed.wait(lock, [&] { return kept->done; });
}

void finish(const DonePtr& done) {
  done->time_ns = clock_ns();
  done->done = true;
  done->changed.notify_all();
}

void execute(const Operation& operation) {
  Context& context = *operation.context;
  if (context.error != 0 && !operation.even_after_error) return;
  const CUresult result = operation.run ? operation.run() : CUDA_SUCCESS;
  int none = CUDA_SUCCESS;
  if (result != CUDA_SUCCESS) context.error.compare_exchange_strong(none, result);
}

static void serve(const StreamPtr& stream) {
  Lock lock(state().lock);
  for (;;) {
    stream->wake.wait(lock, [&] { return !stream->queue.empty() || stream->destroyed; });
    if (stream->queue.empty()) return;
    Stream::Entry entry = std::move(stream->queue.front());
    stream->queue.pop_front();
    for (const DonePtr& done : entry.after) wait_for(lock, done);
    lock.unlock();
    delay(stream->random);
    execute(entry.operation);
    // What the operation keeps alive may be a module, whose end takes locks of its own.
    entry.operation.run = nullptr;
    lock.lock();
    finish(entry.done);
  }
}

StreamPtr make_stream(Context& context, unsigned flags, int priority, bool legacy) {
  auto stream = std::make_shared<Stream>();
  stream->id = state().next_id++;
  stream->context = &context;
  stream->flags = flags;
  stream->priority = priority;
  stream->legacy = legacy;
  stream->random.seed(state().settings.seed * 1000003 + stream->id);
  return stream;
}

// The ends of all blocking streams' work, destroyed streams' included.
static std::vector<DonePtr> blocking_work(const Context& context) {
  std::vector<DonePtr> all;
  for (const StreamPtr& stream : context.streams)
    if (stream->blocking()) all.push_back(stream->last);
  for (const auto& [thread, stream] : context.per_thread) all.push_back(stream->last);
  for (const auto& [done, blocked] : context.orphans)
    if (blocked) all.push_back(done);
  return all;
}

// A stream's work outlives it, and whoever waits for the context waits for that work too.
void leave_orphan(Stream& stream) {
  auto& orphans = stream.context->orphans;
  for (size_t i = orphans.size(); i-- > 0;)
    if (is_done(orphans[i].first)) orphans.erase(orphans.begin() + long(i));
  if (!is_done(stream.last)) orphans.emplace_back(stream.last, stream.blocking());
  stream.destroyed = true;
  stream.wake.notify_all();
}

CUresult submit(Stream& stream, Operation operation, DonePtr* done, std::vector<DonePtr> after) {
  if (stream.capture != nullptr) return capture_operation(stream, std::move(operation));
  Context& context = *stream.context;
  if (stream.legacy) {
    RETURN_IF_ERROR(refuse_legacy_in_capture(context));
    for (const DonePtr& other : blocking_work(context))
      if (!is_done(other)) after.push_back(other);
  } else if (stream.blocking() && !is_done(context.legacy->last)) {
    after.push_back(context.legacy->last);
  }
  if (operation.context == nullptr) operation.context = &context;
  stream.last = std::make_shared<Done>();
  if (done != nullptr) *done = stream.last;
  stream.queue.push_back({std::move(operation), std::move(after), stream.last});
  if (!stream.running) {
    stream.running = true;
    start_thread([kept = stream.shared_from_this()] { serve(kept); });
  }
  stream.wake.notify_one();
  return CUDA_SUCCESS;
}

// What the end of a stream's work means: for the legacy stream, that of all blocking streams as well.
std::vector<DonePtr> pending(const Stream& stream) {
  std::vector<DonePtr> all;
  if (stream.legacy) all = blocking_work(*stream.context);
  all.push_back(stream.last);
  return all;
}

CUresult synchronize(Lock& lock, Context& context) {
  std::vector<DonePtr> all = {context.legacy->last};
  for (const StreamPtr& stream : context.streams) all.push_back(stream->last);
  for (const auto& [thread, stream] : context.per_thread) all.push_back(stream->last);
  for (const auto& [done, blocked] : context.orphans) all.push_back(done);
  for (const DonePtr& done : all) wait_for(lock, done);
  return CUresult(context.error.load());
}

}  // namespace emulated
