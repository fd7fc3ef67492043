// What the environment says about communication.
#pragma once

#include <cstdint>

namespace npusim::hccl {

// When two ranks that never met build the link between them.
enum class Links {
  kHost,    // the call that needs it first does not return before the other end has called
  kStream,  // the operation does it when it runs
};

struct Settings {
  int64_t connect = 120'000'000'000;  // HCCL_CONNECT_TIMEOUT, in nanoseconds
  int64_t execute = 1'836'000'000'000;  // HCCL_EXEC_TIMEOUT, in nanoseconds; 0: no limit
  int slow_rank = -1;                 // NPUSIM_HCCL_SLOW=rank:milliseconds
  int64_t slow = 0;                   // in nanoseconds
  int doomed_rank = -1;               // NPUSIM_HCCL_DIES=rank:operation, counted from 1
  uint64_t doomed_operation = 0;
  Links links = Links::kHost;         // NPUSIM_HCCL_LINKS=host or stream
  int world_rank = -1;                // NPUSIM_HCCL_RANK, else RANK; -1: neither is set
};

// Reads it anew. A value that makes no sense ends the process with one line.
Settings read_settings();

}  // namespace npusim::hccl
