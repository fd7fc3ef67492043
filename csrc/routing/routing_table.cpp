#include "routing/routing_table.h"

#include <algorithm>

namespace equipoise {

void sort_slots(Ids placement, Span<std::int32_t> start, Span<std::int32_t> replicas) {
    std::fill(start.begin(), start.end(), 0);
    for (std::int32_t expert : placement) ++start[expert + 1];
    for (std::size_t e = 1; e < start.size; ++e) start[e] += start[e - 1];
    // Counting sort without a second array: start[e] is the cursor of expert e, and ends as the
    // start of e + 1. The copy afterwards shifts all of them back by one.
    for (std::size_t s = 0; s < placement.size; ++s)
        replicas[start[placement[s]]++] = static_cast<std::int32_t>(s);
    std::copy_backward(start.begin(), start.end() - 1, start.end());
    start[0] = 0;
}

std::int32_t find_unplaced_expert(Ids start) {
    for (std::size_t e = 0; e + 1 < start.size; ++e)
        if (start[e] == start[e + 1]) return static_cast<std::int32_t>(e);
    return -1;
}

std::int32_t accumulate_shares(Ids shares, Ids start, Ids replicas, Span<std::int32_t> cumulative) {
    for (std::size_t e = 0; e + 1 < start.size; ++e) {
        std::int64_t sum = 0;
        for (std::int32_t i = start[e]; i < start[e + 1]; ++i) {
            sum += shares[replicas[i]];
            // Before it is cut to 32 bits: a wrapped sum could come back to one.
            if (sum > kShareOne) return static_cast<std::int32_t>(e);
            cumulative[i] = static_cast<std::int32_t>(sum);
        }
        if (sum != kShareOne) return static_cast<std::int32_t>(e);
    }
    return -1;
}

}  // namespace equipoise
