// Threads of the driver: started at need, kept for ever, never too few.
// Knows nothing of what they run.
#pragma once

#include <functional>

namespace emulated {

// Starts a detached thread that takes no signals of the process.
void start_thread(std::function<void()> body);

// Runs a task on a thread of its own at once: a task may wait for any other.
void run_at_once(std::function<void()> task);

}  // namespace emulated
