// Finds two experts with one replica each that should trade places.
#pragma once

#include <vector>

#include "planning/rank_topology.h"

namespace equipoise {

struct ExpertSwap {
    std::int64_t gain = 0;
    std::int32_t from = -1, to = -1;
};

// Where a swap is looked for.
struct SwapSearch {
    const std::vector<std::int32_t>& inside;  // ranks with too much load
    const std::vector<std::int8_t>& open;     // by rank: 1 if it may take load
    const std::vector<std::int64_t>& single;  // by rank: load of experts with one replica
    std::int64_t excess;                      // load that has to leave the ranks inside
    std::int64_t mean;                        // height at which all ranks are level
};

class ExpertSwaps {
 public:
    ExpertSwaps(const LayerState& state, const RankTopology& topology);

    // Returns the swap that takes most of the excess to a rank with room for it; `from` is -1 if
    // none gains more than `more_than`. Looks at the least loaded ranks and at some of those inside
    // only.
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
