// The memory that the ranks of one communicator share, whether threads or processes, and waiting in it.
// Knows nothing of collectives. The memory is a memfd without a name: it is gone when its last process is.
//
// NOTE (arrival) A rank publishes by counting up `arrived` (release) after its writes, and ringing the bell; a waiter
// reads the bell first, then looks (acquire), then sleeps only while the bell still reads the same. So no arrival is
// slept over, and what was written before it is seen.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <string>
#include <vector>

#include "nccl_driver.h"

namespace emulated_nccl {

constexpr int kMaxRanks = 64;
constexpr size_t kStageBytes = size_t(1) << 20;  // of each rank: what peers read of its array at a time
constexpr size_t kMailBytes = size_t(1) << 16;   // of each pair of ranks
constexpr int kPauseMs = 20;                     // between looks at peers that may have died

// Every wait ends after this: NCCL itself would wait for ever.
inline double limit_s() {
  const char* text = getenv("EMULATED_NCCL_TIMEOUT_S");
  return text ? atof(text) : 20;
}

inline bool failed_work_stays() {
  const char* text = getenv("EMULATED_NCCL_FAILED_WORK_STAYS");
  return text && text[0] == '1';
}

// Who a rank is, as it says itself when it joins.
struct Identity {
  int rank = -1;
  int nranks = 0;
  int device = 0;
  pid_t pid = 0;
  uint64_t host = 0;
  char bus_id[16] = {};
};

// What a rank's present collective is, for the others to compare with theirs.
struct Header {
  int kind, type, op, scaled, root;
  uint64_t scalar, count;
  bool operator==(const Header& other) const {
    return kind == other.kind && type == other.type && op == other.op && scaled == other.scaled && root == other.root &&
           scalar == other.scalar && count == other.count;
  }
};

enum class Health : uint32_t { kFine, kAborted, kFailed };

struct alignas(128) RankState {
  std::atomic<uint64_t> arrived;    // steps of collectives
  std::atomic<uint64_t> assembled;  // steps of splits, which run beside collectives
  std::atomic<Health> health;
  Identity identity;
  Header header;
  int color, key;
  UniqueId split_id;
};

// One piece of a message at a time, from one rank to another.
struct alignas(128) Mailbox {
  std::atomic<uint64_t> put;
  std::atomic<uint64_t> taken;
  uint64_t piece_bytes;
  uint64_t message_bytes;
};

class Shared {
 public:
  static size_t bytes(int nranks) { return results_offset(nranks) + kStageBytes; }

  Shared(int fd, int nranks) : nranks_(nranks) {
    void* memory = mmap(nullptr, bytes(nranks), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) throw Failure{kSystemError, std::string("mmap: ") + strerror(errno)};
    memory_ = static_cast<uint8_t*>(memory);
  }
  ~Shared() {
    munmap(memory_, bytes(nranks_));
    for (const int fd : processes_) {
      if (fd >= 0) close(fd);
    }
  }
  Shared(const Shared&) = delete;

  int nranks() const { return nranks_; }
  std::atomic<uint32_t>& bell() { return *reinterpret_cast<std::atomic<uint32_t>*>(memory_); }
  RankState& rank(int rank) { return reinterpret_cast<RankState*>(memory_ + kStatesOffset)[rank]; }
  Mailbox& mailbox(int from, int to) {
    return reinterpret_cast<Mailbox*>(memory_ + mailboxes_offset(nranks_))[from * nranks_ + to];
  }
  uint8_t* stage(int rank) { return memory_ + stages_offset(nranks_) + rank * kStageBytes; }
  uint8_t* mail(int from, int to) { return memory_ + mail_offset(nranks_) + (from * nranks_ + to) * kMailBytes; }
  uint8_t* results() { return memory_ + results_offset(nranks_); }

  void ring() {
    bell().fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, &bell(), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  void set_health(int rank, Health health) {
    Health fine = Health::kFine;
    this->rank(rank).health.compare_exchange_strong(fine, health);
    ring();
  }

  // Sleeps until the bell no longer reads `seen`, but not long.
  void sleep(uint32_t seen) {
    const timespec pause = {0, kPauseMs * 1000000L};
    syscall(SYS_futex, &bell(), FUTEX_WAIT, seen, &pause, nullptr, 0);
  }

  // True once the rank's process has ended, even if nobody has asked for its exit status.
  bool dead(int rank) {
    if (int(processes_.size()) <= rank || processes_[rank] < 0) return false;
    pollfd end = {processes_[rank], POLLIN, 0};
    return poll(&end, 1, 0) == 1;
  }

  // Called once, before any wait.
  void watch_processes() {
    for (int r = 0; r < nranks_; ++r) {
      const pid_t pid = rank(r).identity.pid;
      processes_.push_back(pid == getpid() ? -1 : int(syscall(SYS_pidfd_open, pid, 0)));
    }
  }

 private:
  static constexpr size_t kStatesOffset = 128;
  static size_t mailboxes_offset(int nranks) { return kStatesOffset + nranks * sizeof(RankState); }
  static size_t stages_offset(int nranks) {
    const size_t end = mailboxes_offset(nranks) + size_t(nranks) * nranks * sizeof(Mailbox);
    return (end + 4095) / 4096 * 4096;
  }
  static size_t mail_offset(int nranks) { return stages_offset(nranks) + nranks * kStageBytes; }
  static size_t results_offset(int nranks) { return mail_offset(nranks) + size_t(nranks) * nranks * kMailBytes; }

  const int nranks_;
  uint8_t* memory_;
  std::vector<int> processes_;
};

// One wait of one rank: asleep between looks, and never past its limit.
class Wait {
 public:
  Wait(Shared& shared, const char* what) : shared_(shared), what_(what), seen_(shared.bell().load()) {}

  // To be called before the caller looks at whatever it waits for.
  void look() { seen_ = shared_.bell().load(std::memory_order_acquire); }

  // Sleeps a while. `behind(rank)` says whether that rank is being waited for.
  template <class Behind>
  void pause(Behind behind) {
    shared_.sleep(seen_);
    for (int r = 0; r < shared_.nranks(); ++r) {
      const Health health = shared_.rank(r).health.load();
      if (health != Health::kFine)
        throw Failure{kRemoteError, "rank " + std::to_string(r) +
                                        (health == Health::kAborted ? " aborted" : " failed") +
                                        " while others waited in " + what_};
    }
    for (int r = 0; r < shared_.nranks(); ++r) {
      // Looked at again after its death: it may have arrived and then ended in peace.
      if (behind(r) && shared_.dead(r) && behind(r))
        throw Failure{kRemoteError, "the process of rank " + std::to_string(r) + " ended before " + what_};
    }
    if (std::chrono::steady_clock::now() - start_ > std::chrono::duration<double>(limit_s())) {
      std::string ranks;
      for (int r = 0; r < shared_.nranks(); ++r) {
        if (behind(r)) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
      }
      throw Failure{kInternalError,
                    std::string(what_) + " made no progress within the limit; waiting for rank " + ranks};
    }
  }

  template <class Behind>
  void until_none(Behind behind) {
    for (;;) {
      look();
      bool any = false;
      for (int r = 0; r < shared_.nranks(); ++r) any = any || behind(r);
      if (!any) return;
      pause(behind);
    }
  }

 private:
  Shared& shared_;
  const char* what_;
  uint32_t seen_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace emulated_nccl
