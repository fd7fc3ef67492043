// Events: points in streams.
#pragma once

#include <atomic>
#include <memory>

#include "capture.h"
#include "engine.h"

namespace npusim {

// One recording. Whoever waits keeps the recording that was the latest when the wait was issued
// (ASSUMED, as CUDA documents it for cudaStreamWaitEvent).
struct Recording {
  Stream* stream = nullptr;
  uint64_t place = 0;       // of the recording's task in its stream
  Spot spot;                // in place of both, in a capture
  int64_t asked = 0;        // when a lazy device was first asked whether it has come
  std::atomic<bool> reached{false};
  std::atomic<int64_t> at{0};  // nanoseconds
};

// Flags of aclrtCreateEventExWithFlag that matter here (interface facts).
constexpr uint32_t kEventExternal = 0x20;

struct Event {
  explicit Event(uint32_t flags) : flags(flags) {}
  const uint32_t flags;
  std::shared_ptr<Recording> latest;   // guarded by the engine's lock
  std::shared_ptr<std::atomic<int>> full = std::make_shared<std::atomic<int>>(0);  // external: set
};

void record(Event& event, void* stream);
void wait(Event& event, void* stream);
void reset(Event& event, void* stream);

// Whether the latest recording has been reached; true when there is none. Throws the sticky error
// of its stream.
bool query(Event& event);
// Blocks; returns whether it was reached within so many milliseconds (negative: no limit).
bool synchronize(Event& event, int64_t milliseconds);

}  // namespace npusim
