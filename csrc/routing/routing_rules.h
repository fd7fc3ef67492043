// Expert ids in, slots out, by the rules of other engines. The semantics stand in
// hal/routing_rules.py. `start` and `replicas` are those of a routing table; shares are not read.
#pragma once

#include "common/span.h"

namespace equipoise {

// Each row of `top_k` elements by its hash; only elements of the first `rows` rows are counted.
void route_by_row_hash(Ids ids, Ids start, Ids replicas, std::int64_t top_k, std::int64_t rows,
                       Span<std::int32_t> slots, Span<std::int32_t> counts);

// Each element by its turn among those of its expert in a block of 1024, behind block and offset.
void route_by_block_turns(Ids ids, Ids start, Ids replicas, std::int64_t offset,
                          Span<std::int32_t> slots, Span<std::int32_t> counts);

}  // namespace equipoise
