// Shares by water-filling, as `hal/routing.py` defines them for every backend.
#pragma once

#include "common/span.h"
#include "routing/routing_table.h"

namespace equipoise {

// Block coordinate descent on the sum of squared rank loads. In a sweep each expert, in ascending
// order, is taken off its ranks and refilled from the least loaded one up to a common height; its
// replicas on one rank are one bin. Integers throughout (tokens << 16); what the division leaves
// over goes one unit each to the filled bins of the lowest ranks. Ends after `sweeps` sweeps, or
// with the first that changes nothing.
//
// Bins are split evenly among their replicas and rounded to shares by largest remainder (ties:
// lower slot). An expert without tokens gets even shares. If rounding leaves the largest rank above
// that of even shares, even shares are the result. `shares[i]` belongs to `replicas[i]`, and the
// shares of an expert sum to 65536.
//
// A plan has the exact optimum instead (planning/max_flow_levelling.h). This is what kernels on
// every device can do in a fixed number of steps.
void solve_shares(Counts counts, Ids start, Ids replicas, std::int64_t ranks, std::int64_t sweeps,
                  Span<std::int32_t> shares);

// Turns shares by replica into cumulative shares, in place.
void accumulate_replica_shares(Ids start, Span<std::int32_t> shares);

}  // namespace equipoise
