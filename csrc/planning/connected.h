// A whole plan, whose copies connect all ranks.
#pragma once

#include "planning/rank_topology.h"

namespace equipoise {

// Ranks are joined by the experts that they both hold: load flows along these joints when shares
// are solved, so a batch can be levelled over all ranks that are connected, and over no others.
// - Copies by count_copies of `score`; experts by score per copy, descending, then by id.
// - All but one copy of each expert are dealt to the ranks in turn, so that each rank has a joint.
// - Of each of these experts the last copy goes to a rank of another component, as long as there is
//   one: to the least full of them.
// - Experts with one copy follow, each to the least full rank.
// No rank gets two copies of an expert, where slots <= experts * ranks. Ties go to the lower rank.
// "Full" is by score, relative to capacity. Writes the expert of each slot.
void plan_connected(Counts score, const RankTopology& topology, Span<std::int32_t> placement);

}  // namespace equipoise
