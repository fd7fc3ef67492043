// Relabels a plan made anew, so that few copies move.
#pragma once

#include "common/span.h"

namespace equipoise {

// Writes `proposed` with ranks and slots renamed. Which experts share a rank stays as proposed, and
// so does the balance, as long as ranks are alike.
//
// Ranks are matched greedily: pairs (proposed, installed) by the number of experts that they have
// in common, descending, then by lower proposed and lower installed rank. If this keeps fewer
// experts in place than no relabelling of ranks, ranks keep their names. Slots: an expert that is
// installed on the rank keeps its slot (lower slots first); the others fill the free slots by
// ascending expert.
void align_slots(Ids installed, Ids proposed, std::int64_t ranks, Span<std::int32_t> aligned);

// Returns how many experts in `proposed` their rank does not hold in `installed`, as multisets per
// rank: what has to be copied between ranks.
std::int64_t count_moves(Ids installed, Ids proposed, std::int64_t ranks);

}  // namespace equipoise
