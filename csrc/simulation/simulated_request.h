// A request of the simulation with its whole fate, which routers see only in part.
#pragma once

#include <cstdint>
#include <vector>

namespace equipoise::requests {

enum class RequestFate : std::uint8_t { ahead, waiting, active, finished, failed };

struct SimulatedRequest {
    std::int64_t prompt = 1, output = 1;
    double arrival = 0, admitted = -1, first = -1, end = -1;  // seconds
    std::int64_t made = 0;                                    // tokens so far
    std::int64_t missing =
        0;  // tokens to compute: of the prompt, and those made before a preemption
    std::int64_t end_tick = 0;  // tick of its worker at which it ends, -1 while it waits again
    std::int64_t admitted_step = -1;
    std::int32_t worker = -1, handle = -1;
    std::int32_t preemptions = 0;
    RequestFate fate = RequestFate::ahead;
};

// What front ends are told, in the order of events.
struct WorkerEvent {
    enum class Kind : std::uint8_t { start, tick, grow, pause, finish, fail } kind;
    std::int32_t subject;  // the request; the worker for a tick
    std::int64_t tokens = 1;
};

}  // namespace equipoise::requests
