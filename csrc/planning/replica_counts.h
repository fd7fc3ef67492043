// How many replicas each expert gets.
#pragma once

#include <vector>

#include "common/span.h"

namespace equipoise {

// Fewest and most replicas of an expert.
struct ReplicaRange {
    std::int32_t low, high;
};

// Each expert gets `range.low` replicas; every further slot goes to the expert with the most load
// per replica that may have more, ties to the larger expert id, as in DeepSeek's EPLB. This
// minimises the largest load per replica. Without any load each expert gets slots / experts, and
// the lowest ids the remainder. Needs experts * low <= slots <= experts * high.
std::vector<std::int32_t> count_replicas(Counts load, std::size_t slots, ReplicaRange range);

}  // namespace equipoise
