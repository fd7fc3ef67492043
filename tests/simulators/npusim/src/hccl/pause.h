// How a host thread waits for another process: short naps that grow.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

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

}  // namespace npusim::hccl
