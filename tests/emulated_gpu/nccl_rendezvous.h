// How ranks that hold the same unique id find each other: who made the id serves them their shared memory.
// Knows nothing of what they do with it. The id names an abstract Unix socket: nothing is left behind by a kill.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <fstream>
#include <memory>
#include <random>
#include <thread>

#include "nccl_shared.h"

namespace emulated_nccl {

struct Reply {
  int result = kSuccess;
  char text[200] = {};
};

inline sockaddr_un address_of(const UniqueId& id, socklen_t* bytes) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const size_t length = strnlen(id.internal, sizeof address.sun_path - 1);
  memcpy(address.sun_path + 1, id.internal, length);
  *bytes = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + length);
  return address;
}

inline void send_reply(int socket, const Reply& reply, int fd) {
  iovec data = {const_cast<Reply*>(&reply), sizeof reply};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  sendmsg(socket, &message, MSG_NOSIGNAL);
}

// Serves one communicator: waits for all its ranks, gives each the memory, ends.
class Root {
 public:
  explicit Root(int listener) : listener_(listener) {}
  ~Root() {
    close(listener_);
    for (const Joined& each : joined_) close(each.socket);
  }

  void serve() {
    for (;;) {
      const double left_s = joined_.empty() ? -1 : limit_s() - elapsed_s();
      std::vector<pollfd> events = {{listener_, POLLIN, 0}};
      for (const Joined& each : joined_) events.push_back({each.socket, POLLIN, 0});
      const int ready = poll(events.data(), events.size(), joined_.empty() ? -1 : std::max(0, int(left_s * 1000)));
      if (ready < 0 && errno == EINTR) continue;
      if (ready <= 0) return refuse(kSystemError, "only " + std::to_string(joined_.size()) + " ranks came in time");
      for (size_t i = 1; i < events.size(); ++i) {
        if (events[i].revents) return refuse(kRemoteError, "a rank left before all had come");
      }
      const std::string fault = accept_rank();
      if (!fault.empty()) return refuse(kInvalidArgument, fault);
      if (!joined_.empty() && int(joined_.size()) == joined_[0].identity.nranks) return give();
    }
  }

 private:
  struct Joined {
    int socket;
    Identity identity;
  };

  double elapsed_s() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - first_).count(); }

  std::string accept_rank() {
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    Identity identity;
    if (socket < 0) return "";
    if (recv(socket, &identity, sizeof identity, 0) != sizeof identity) {
      close(socket);
      return "";
    }
    if (joined_.empty()) first_ = std::chrono::steady_clock::now();
    joined_.push_back({socket, identity});
    for (size_t i = 0; i + 1 < joined_.size(); ++i) {
      if (joined_[i].identity.rank == identity.rank) return "rank " + std::to_string(identity.rank) + " came twice";
      if (joined_[i].identity.nranks != identity.nranks) return "the ranks differ in the number of ranks";
    }
    return "";
  }

  void refuse(Result result, const std::string& text) {
    Reply reply;
    reply.result = result;
    snprintf(reply.text, sizeof reply.text, "%s", text.c_str());
    for (const Joined& each : joined_) send_reply(each.socket, reply, -1);
  }

  void give() {
    const int nranks = joined_[0].identity.nranks;
    const int fd = memfd_create("emulated-nccl", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, off_t(Shared::bytes(nranks))) != 0)
      return refuse(kSystemError, std::string("shared memory: ") + strerror(errno));
    Shared shared(fd, nranks);
    for (const Joined& each : joined_) shared.rank(each.identity.rank).identity = each.identity;
    for (const Joined& each : joined_) send_reply(each.socket, Reply(), fd);
    close(fd);
  }

  const int listener_;
  std::vector<Joined> joined_;
  std::chrono::steady_clock::time_point first_;
};

// A new id, and a thread that serves whoever brings it.
inline UniqueId make_unique_id() {
  UniqueId id = {};
  std::random_device random;
  snprintf(id.internal, sizeof id.internal, "emulated-nccl-%08x%08x%08x%08x", random(), random(), random(), random());
  socklen_t bytes;
  const sockaddr_un address = address_of(id, &bytes);
  const int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (listener < 0 || bind(listener, reinterpret_cast<const sockaddr*>(&address), bytes) != 0 ||
      listen(listener, kMaxRanks) != 0)
    throw Failure{kSystemError, std::string("rendezvous socket: ") + strerror(errno)};
  std::thread([listener] {
    try {
      Root(listener).serve();
    } catch (const Failure&) {  // the ranks see their connections end
    }
  }).detach();
  return id;
}

// What NCCL compares to tell machines apart, NCCL_HOSTID included.
inline uint64_t host_hash() {
  std::string name;
  if (const char* chosen = getenv("NCCL_HOSTID"))
    name = chosen;
  else
    std::ifstream("/proc/sys/kernel/random/boot_id") >> name;
  return std::hash<std::string>()(name);
}

// Brings one rank to the others. Returns once all have come.
inline std::shared_ptr<Shared> join(const UniqueId& id, const Identity& identity) {
  socklen_t bytes;
  const sockaddr_un address = address_of(id, &bytes);
  const int server = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  const auto fail = [&](Result result, const std::string& text) {
    close(server);
    throw Failure{result, "rank " + std::to_string(identity.rank) + " cannot join: " + text};
  };
  if (server < 0 || connect(server, reinterpret_cast<const sockaddr*>(&address), bytes) != 0)
    fail(kSystemError, strerror(errno));
  if (send(server, &identity, sizeof identity, MSG_NOSIGNAL) != sizeof identity) fail(kRemoteError, strerror(errno));

  Reply reply;
  iovec data = {&reply, sizeof reply};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t received;
  do {
    received = recvmsg(server, &message, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received != sizeof reply) fail(kRemoteError, "the process that made the unique id has ended");
  if (reply.result != kSuccess) fail(Result(reply.result), reply.text);
  int fd = -1;
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message)) memcpy(&fd, CMSG_DATA(header), sizeof fd);
  if (fd < 0) fail(kSystemError, "no shared memory came");
  close(server);
  std::shared_ptr<Shared> shared;
  try {
    shared = std::make_shared<Shared>(fd, identity.nranks);
  } catch (...) {
    close(fd);
    throw;
  }
  close(fd);
  shared->watch_processes();
  return shared;
}

}  // namespace emulated_nccl
