// Routes a batch by the rules of other engines, which know no shares. `hal/routing_rules.py`
// defines them. `start` and `replicas` are those of a routing table.
#pragma once

#include "common/span.h"

namespace equipoise {

// vLLM: a hash of the row chooses the replica of all its `top_k` elements. Only the first `rows`
// rows are counted; the others are padding of a captured graph.
void route_by_row_hash(Ids ids, Ids start, Ids replicas, std::int64_t top_k, std::int64_t rows,
                       Span<std::int32_t> slots, Span<std::int32_t> counts);

// TensorRT-LLM: the occurrences of an expert in a block of 1024 elements take its replicas in turn,
// beginning with number block + offset.
void route_by_block_turns(Ids ids, Ids start, Ids replicas, std::int64_t offset,
                          Span<std::int32_t> slots, Span<std::int32_t> counts);

}  // namespace equipoise
