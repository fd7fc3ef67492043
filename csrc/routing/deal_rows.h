// Deals the rows of experts to the ranks that might have sent them.
#pragma once

#include "common/span.h"

namespace equipoise {

// Each of the `counts` [experts] rows goes to one of `ranks` at random: `dealt` [ranks * experts]
// gets how many of each expert come from each rank. The odds differ by at most ranks / 2^16.
void deal_rows(Ids counts, std::int32_t ranks, std::uint64_t seed, Span<std::int32_t> dealt);

}  // namespace equipoise
