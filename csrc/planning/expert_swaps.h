// Two experts with one copy that trade places.
#pragma once

#include <vector>

#include "planning/rank_topology.h"

namespace equipoise {

struct ExpertSwap {
    std::int64_t gain = 0;
    std::int32_t from = -1, to = -1;
};

// What a swap is looked for among.
struct SwapSearch {
    const std::vector<std::int32_t>& inside;  // ranks that hold too much
    const std::vector<std::int8_t>& open;     // by rank: may take of it
    const std::vector<std::int64_t>& single;  // by rank: load of the experts with one copy
    std::int64_t excess;                      // that is to leave the ranks inside
    std::int64_t mean;                        // height at which all are equally full
};

class ExpertSwaps {
 public:
    ExpertSwaps(const LayerState& state, const RankTopology& topology);

    // The swap that brings most of the excess to a rank that has room for it; `from` is -1 if there
    // is none that gains more than that. Looked for among the least full ranks and some of those
    // inside.
    ExpertSwap best(const SwapSearch& search, std::int64_t more_than);

 private:
    void sort_ranks(std::size_t count, std::int64_t mean);
    void sort_slots(std::int32_t rank);
    std::int64_t room(std::int32_t outside, const SwapSearch& search) const;
    void consider(std::int32_t inside, std::int32_t outside, const SwapSearch& search,
                  ExpertSwap& best) const;

    const LayerState& state_;
    const RankTopology& topology_;
    std::vector<std::int32_t> order_;
    std::vector<std::vector<std::int32_t>> slots_;  // by rank, by ascending flow
};

}  // namespace equipoise
