// Delays threads at random around every flag access of the kernels, so that ranks meet in ever new orders.
// Knows nothing of kernels. Include it before them: it renames the builtins that they use for flags.
#pragma once

#include <sched.h>
#include <stdint.h>
#include <time.h>

// The standard library uses the same builtins: it is read before they are renamed.
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace race {

inline uint64_t mix(uint64_t a) {
  a = (a ^ (a >> 30)) * 0xbf58476d1ce4e5b9u;
  a = (a ^ (a >> 27)) * 0x94d049bb133111ebu;
  return a ^ (a >> 31);
}
// A number that depends on all of its arguments.
template <class... More>
uint64_t hash(uint64_t a, More... more) {
  const uint64_t parts[] = {uint64_t(more)...};
  for (uint64_t part : parts) a = mix(a + 0x9e3779b97f4a7c15u + part);
  return a;
}

inline uint64_t shake_period = 8;  // one access in so many yields, one in ten times as many sleeps; 0: none
inline thread_local uint64_t shake_state = 1;

inline void shake() {
  if (shake_period == 0) return;
  shake_state = mix(shake_state + 0x9e3779b97f4a7c15u);
  if (shake_state % shake_period == 0) sched_yield();
  if (shake_state % (10 * shake_period) != 1) return;
  const timespec nap = {0, long(shake_state >> 32) % 60000};
  nanosleep(&nap, nullptr);
}

}  // namespace race

#define __atomic_store_n(word, value, order) (race::shake(), __atomic_store_n(word, value, order))
#define __atomic_load_n(word, order) (race::shake(), __atomic_load_n(word, order))
