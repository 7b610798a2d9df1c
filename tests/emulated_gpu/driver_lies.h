// Peer access that lies; see driver_lies.cpp. Who calls holds the state's lock.
#pragma once

#include "driver_state.h"

namespace emulated {

// Makes a kernel's parameters lead to other memory wherever they lead to memory of a GPU that its own cannot reach
// after all.
void mislead(const Context& context, void* params, size_t bytes);

}  // namespace emulated
