// A plan made anew, whose replicas connect all ranks.
#pragma once

#include "planning/rank_topology.h"

namespace equipoise {

// Two ranks are connected if both hold an expert: load can be moved between them by its shares.
// Shares can level a batch over all ranks that are connected, directly or through others, and over
// no more.
//
// 1. Replicas by count_replicas of `score`; experts by score per replica, descending, then by id.
// 2. All but one replica of each expert are dealt to the ranks in turn, so that every rank gets
//    some.
// 3. The last replica of each goes to a rank of another component while there is one, to the least
//    loaded of those.
// 4. Experts with one replica follow, largest first, each to the least loaded rank.
//
// No rank gets two replicas of an expert if slots <= experts * ranks. Ties go to the lower rank.
// Load is by score, relative to capacity. Writes the expert of each slot.
void plan_connected(Counts score, const RankTopology& topology, Span<std::int32_t> placement);

}  // namespace equipoise
