// What the environment says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace npusim {

enum class Mode { kEager, kDelay, kLazy, kExplore };

struct Config {
  Mode mode = Mode::kEager;
  uint64_t seed = 0;           // of delay and explore
  uint64_t rank = 0;           // of the job: its ranks have delays of their own
  int devices = 8;             // NPUSIM_DEVICES
  size_t memory = size_t{4096} << 20;  // NPUSIM_MEMORY, in MiB: bytes of each device
  int64_t longest_delay = 2'000'000;  // NPUSIM_DELAY_US: nanoseconds before a task, at most
  int64_t patience = 2'000'000;  // NPUSIM_PATIENCE_US: nanoseconds of asking whether an event has
                                 // come, after which a lazy device takes that for a demand
  int64_t idle = 20'000'000;   // NPUSIM_IDLE_MS: nanoseconds without a call, after which a lazy or
                               // explored device moves by itself
};

// Read once, at the first call. A schedule that does not exist ends the process with one line.
const Config& config();

// Monotonic nanoseconds.
int64_t now();

}  // namespace npusim
