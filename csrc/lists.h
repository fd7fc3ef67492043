// Shares as lists of replicas, for kernels that know nothing else.
#pragma once

#include "span.h"

namespace equipoise {

// Of each expert of one layer a list as long as `order`, `lists[e * order.size ..]`, in which each
// slot of its run stands as often as its share says, by largest remainder (ties: lower slot).
// Entry j of the list is the one at order[j] of the line in which equal entries stand together, by
// ascending slot. `start` and `slots` are the runs of the layer; `shares` is by slot.
void fill_lists(Ids start, Ids slots, Ids shares, Ids order, Span<std::int32_t> lists);

// Whether `order` holds each of 0 .. size - 1 once.
bool is_order(Ids order);

}  // namespace equipoise
