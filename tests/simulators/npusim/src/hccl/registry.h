// How a process comes into a communicator, and what its handles stand for.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "communicator.h"

namespace npusim::hccl {

// What HcclCommConfig may say; empty or negative: not said.
struct Wishes {
  std::string name;
  int64_t execute = -1;  // nanoseconds
};

// Sits down at `rank` on `device` and waits until all ranks have. Throws Refusal with the missing
// ranks after HCCL_CONNECT_TIMEOUT, and when the flag is set meanwhile: then its seat is empty again,
// and the other ranks wait on.
void* join(const RootInfo& info, int ranks, int rank, int device, const Wishes& wishes,
           const std::atomic<int32_t>* given_up = nullptr);

// Throws Refusal, and it is a fault, when the handle is none or was destroyed.
Shared find(void* handle);

// The handle ends; tasks that still hold the communicator end with an error.
void destroy(void* handle);

// The same, and they end without one.
void abort(void* handle);

}  // namespace npusim::hccl
