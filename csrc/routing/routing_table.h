// The routing table of one layer: which slots hold each expert, and what share each takes.
#pragma once

#include "common/span.h"

namespace equipoise {

struct RoutingTable {
    Ids start;       // [experts + 1], where the run of each expert begins
    Ids replicas;    // [slots], the slots of each expert in turn, ascending
    Ids cumulative;  // [slots], sum of shares up to here, within the run

    std::int32_t experts() const { return static_cast<std::int32_t>(start.size) - 1; }
    std::int32_t slots() const { return static_cast<std::int32_t>(replicas.size); }
};

// One comparison: as unsigned numbers negative ids are larger than any expert.
inline bool is_expert(std::int32_t id, std::int32_t experts) {
    return static_cast<std::uint32_t>(id) < static_cast<std::uint32_t>(experts);
}

// Sorts the slots by expert. Every entry of `placement` must be an expert: it is used as an index.
void sort_slots(Ids placement, Span<std::int32_t> start, Span<std::int32_t> replicas);

// Returns the first expert without a slot, or -1.
std::int32_t find_unplaced_expert(Ids start);

// Writes cumulative shares. Returns the first expert whose shares do not sum to one, or -1.
std::int32_t accumulate_shares(Ids shares, Ids start, Ids replicas, Span<std::int32_t> cumulative);

}  // namespace equipoise
