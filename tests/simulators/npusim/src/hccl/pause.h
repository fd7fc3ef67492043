// How a host thread waits for another process: short naps that grow, and an end.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "core/config.h"

namespace npusim::hccl {

class Pause {
 public:
  void sleep() {
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds_));
    microseconds_ = std::min(microseconds_ * 2, 1000);
  }

 private:
  int microseconds_ = 20;
};

// Until so many nanoseconds have passed, or whoever gave the flag has set it.
class Patience {
 public:
  Patience(int64_t nanoseconds, const std::atomic<int32_t>* given_up)
      : expiry_(now() + nanoseconds), given_up_(given_up) {}
  bool given_up() const { return given_up_ != nullptr && *given_up_ != 0; }
  bool over() const { return given_up() || now() >= expiry_; }

 private:
  int64_t expiry_;
  const std::atomic<int32_t>* given_up_;
};

}  // namespace npusim::hccl
