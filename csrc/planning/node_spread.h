// Moves experts apart that would not survive the loss of a node.
#pragma once

#include "planning/rank_topology.h"

namespace equipoise {

// Each expert that is on one node only trades places with an expert of another node that stays on
// two nodes by it: with the one whose load per replica is nearest, which disturbs the balance
// least. Neither is twice on a rank afterwards. An expert without such a partner stays, and the
// caller refuses the plan.
void spread_over_nodes(Counts score, const RankTopology& topology, Span<std::int32_t> placement);

}  // namespace equipoise
