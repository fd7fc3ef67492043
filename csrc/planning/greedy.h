// The greedy plan of DeepSeek's EPLB.
#pragma once

#include "common/span.h"

namespace equipoise {

// The rule that DeepSeek's EPLB and TensorRT-LLM publish (doReplication, doPlacement), in integers.
//
// 1. Replicas: see count_replicas, with one replica at least and no upper bound.
// 2. Places: replicas by load per replica, descending, then by expert id; each to the least loaded
//    rank that has a free slot, ties to the lower rank. The slots of a rank are filled in order.
//
// Loads per replica are compared exactly (cross multiplication in 128 bits). The load of a rank is
// the sum of floor(load * 65536 / replicas), which is the same number on every machine. Needs slots
// >= experts, slots % ranks == 0 and a sum of loads below 2^46. O(S log(E + R)).
void plan_greedy(Counts load, std::int64_t ranks, Span<std::int32_t> placement);

}  // namespace equipoise
