// The routing table of one layer.
#pragma once

#include "common/span.h"

namespace equipoise {

struct RoutingTable {
    Ids start;       // [experts + 1], exclusive prefix of copies per expert
    Ids replicas;    // [slots], slots by expert, then ascending
    Ids cumulative;  // [slots], inclusive sum of shares within the expert's run

    std::int32_t experts() const { return static_cast<std::int32_t>(start.size) - 1; }
    std::int32_t slots() const { return static_cast<std::int32_t>(replicas.size); }
};

inline bool is_expert(std::int32_t id, std::int32_t experts) {
    return static_cast<std::uint32_t>(id) < static_cast<std::uint32_t>(experts);
}

// Counting sort of the slots by expert. Every entry of `placement` must be an expert.
void sort_slots(Ids placement, Span<std::int32_t> start, Span<std::int32_t> replicas);

// The expert without a slot, or -1.
std::int32_t find_unplaced_expert(Ids start);

// Writes cumulative shares; returns the expert whose shares do not sum to one, or -1.
std::int32_t accumulate_shares(Ids shares, Ids start, Ids replicas, Span<std::int32_t> cumulative);

}  // namespace equipoise
