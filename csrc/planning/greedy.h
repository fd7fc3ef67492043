// The greedy plan: which expert sits in which slot.
#pragma once

#include "common/span.h"

namespace equipoise {

// The rule DeepSeek's EPLB and TensorRT-LLM publish (doReplication, doPlacement), in integers.
// Copies: every expert gets one; each further slot goes to the expert whose load per copy is
// largest, ties to the larger expert id. Slots equal to experts: one copy each. No load at all:
// slots / experts copies each, the remainder to the lowest ids.
// Places: copies by load per copy descending, then expert id ascending; each to the least loaded
// rank that has a free slot, ties to the lower rank; a rank's slots are filled in order.
// Loads per copy are compared exactly (cross multiplication in 128 bits). A rank's load is the
// sum of floor(load * 65536 / copies), so it is the same number on every machine.
// Needs slots >= experts, slots % ranks == 0 and a sum of loads below 2^46. O(S log(E + R)).
void plan_greedy(Counts load, std::int64_t ranks, Span<std::int32_t> placement);

}  // namespace equipoise
