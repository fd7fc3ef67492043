// Routes a batch: expert ids in, slots out. `hal/routing.py` defines what it does.
#pragma once

#include "common/span.h"
#include "routing/routing_table.h"

namespace equipoise {

// Counts each expert in a batch. Counts are overwritten, not added to; ids outside [0, experts) are
// padding and are not counted.
void count_experts(Ids ids, Span<std::int32_t> counts);

// Each element draws its replica by a hash of its place in the batch, in one pass. `begin` is
// window_begin(rank, layer, step). Ids outside [0, experts) get the invalid slot, table.slots().
void route_hashed(Ids ids, const RoutingTable& table, std::uint32_t begin, Span<std::int32_t> slots,
                  Span<std::int32_t> counts);

// Divides the batch's own count of each expert into one whole quota per replica, in two passes:
// count, then assign. `seed` is seed32(rank, layer, 0).
void route_apportioned(Ids ids, const RoutingTable& table, std::uint32_t seed,
                       Span<std::int32_t> slots, Span<std::int32_t> counts);

}  // namespace equipoise
