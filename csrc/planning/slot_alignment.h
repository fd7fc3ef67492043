// Which rank, and which slot of it, a proposed plan's copies take.
#pragma once

#include "common/span.h"

namespace equipoise {

// Relabels `proposed` so that few copies move; which experts share a rank stays as proposed.
// Ranks: pairs (proposed, installed) in the order of the number of copies in common descending,
// then lower proposed rank, then lower installed rank; each pair whose two ranks are both free is
// taken. When that keeps fewer copies than no relabelling of ranks, the ranks stay.
// Slots: a copy whose expert is installed on the rank keeps that slot (lower slots first), the
// others fill the free slots by ascending expert.
void align_slots(Ids installed, Ids proposed, std::int64_t ranks, Span<std::int32_t> aligned);

// Copies in `proposed` that their rank does not hold in `installed`, as multisets per rank.
std::int64_t count_moves(Ids installed, Ids proposed, std::int64_t ranks);

}  // namespace equipoise
