// How the tokens of an expert are divided among its copies.
#pragma once

#include "common/span.h"
#include "routing/routing_table.h"

namespace equipoise {

// Water-filling: block coordinate descent on the sum of squared rank loads. Experts in ascending
// order; the copies of one expert on one rank are one bin; an expert's bins are emptied, then
// filled from the lowest level up. Integers throughout (tokens << 16); a remainder goes one unit
// each to the filled bins of the lowest ranks. Ends after `sweeps` sweeps, or with the first that
// changes nothing. Bins are rounded to shares by largest remainder (ties: lower slot), a bin is
// split evenly among its copies, an expert without tokens gets even shares. Should the rounding
// leave the largest rank above that of even shares, the even shares are the answer.
// `shares[i]` belongs to `replicas[i]` and the shares of an expert sum to 65536.
void solve_shares(Counts counts, Ids start, Ids replicas, std::int64_t ranks, std::int64_t sweeps,
                  Span<std::int32_t> shares);

// In place: shares by replica become cumulative shares.
void accumulate_replica_shares(Ids start, Span<std::int32_t> shares);

}  // namespace equipoise
