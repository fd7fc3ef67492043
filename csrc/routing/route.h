// Expert ids in, slots out. The semantics stand in hal/routing.py.
#pragma once

#include "common/span.h"
#include "routing/routing_table.h"

namespace equipoise {

// Counts are written, not added to; ids outside [0, experts) are ignored.
void count_experts(Ids ids, Span<std::int32_t> counts);

// One pass: each element draws its replica by the hash of its place. `begin` is
// window_begin(rank, layer, step). Ids outside [0, experts) get the slot table.slots().
void route_hashed(Ids ids, const RoutingTable& table, std::uint32_t begin, Span<std::int32_t> slots,
                  Span<std::int32_t> counts);

// Two passes: the batch's own count of each expert is divided into whole quotas, one interval of
// occurrences per replica. `seed` is seed32(rank, layer, 0).
void route_apportioned(Ids ids, const RoutingTable& table, std::uint32_t seed,
                       Span<std::int32_t> slots, Span<std::int32_t> counts);

}  // namespace equipoise
