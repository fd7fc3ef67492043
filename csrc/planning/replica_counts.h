// How many copies each expert gets.
#pragma once

#include <vector>

#include "common/span.h"

namespace equipoise {

// Between how many copies of an expert there must and may be.
struct ReplicaRange {
    std::int32_t low, high;
};

// `range.low` copies each; every further slot to the expert whose load per copy is largest and that
// may have more, ties to the larger expert id, compared exactly. No load at all: slots / experts
// copies each, the remainder to the lowest ids. Needs experts * low <= slots <= experts * high.
std::vector<std::int32_t> count_replicas(Counts load, std::size_t slots, ReplicaRange range);

}  // namespace equipoise
