// Experts that would not survive the loss of a node.
#pragma once

#include "planning/rank_topology.h"

namespace equipoise {

// Has each expert that is on one node only trade places with one that does not mind: of those the
// one whose copies are most alike in size. Neither is twice on a rank afterwards. Where there is
// none the expert stays.
void spread_over_nodes(Counts score, const RankTopology& topology, Span<std::int32_t> placement);

}  // namespace equipoise
