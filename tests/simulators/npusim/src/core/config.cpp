#include "config.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <unistd.h>

namespace npusim {
namespace {

uint64_t number(const char* name, uint64_t otherwise) {
  const char* value = getenv(name);
  return value != nullptr && *value != '\0' ? strtoull(value, nullptr, 10) : otherwise;
}

void read_schedule(const std::string& value, Config& out) {
  const size_t colon = value.find(':');
  const std::string name = value.substr(0, colon);
  if (colon != std::string::npos) out.seed = strtoull(value.c_str() + colon + 1, nullptr, 10);
  if (name == "eager") {
    out.mode = Mode::kEager;
  } else if (name == "delay") {
    out.mode = Mode::kDelay;
  } else if (name == "lazy") {
    out.mode = Mode::kLazy;
  } else if (name == "explore") {
    out.mode = Mode::kExplore;
  } else {
    fprintf(stderr, "npusim: NPUSIM_SCHEDULE is %s: eager, delay:SEED, lazy or explore:SEED\n",
            value.c_str());
    _exit(2);
  }
}

Config read() {
  Config out;
  const char* schedule = getenv("NPUSIM_SCHEDULE");
  if (schedule != nullptr && *schedule != '\0') read_schedule(schedule, out);
  // The ranks of a job on `delay` must not be late alike. An explored process stands alone.
  if (out.mode == Mode::kDelay) out.rank = number("NPUSIM_HCCL_RANK", number("RANK", 0));
  out.devices = static_cast<int>(number("NPUSIM_DEVICES", out.devices));
  out.memory = number("NPUSIM_MEMORY", out.memory >> 20) << 20;
  out.longest_delay = static_cast<int64_t>(number("NPUSIM_DELAY_US", 2000)) * 1000;
  out.patience = static_cast<int64_t>(number("NPUSIM_PATIENCE_US", 2000)) * 1000;
  out.idle = static_cast<int64_t>(number("NPUSIM_IDLE_MS", 20)) * 1'000'000;
  return out;
}

}  // namespace

const Config& config() {
  static const Config* const kept = new Config(read());
  return *kept;
}

int64_t now() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace npusim
