// Swaps that give shares room to level single batches.
#pragma once

#include <vector>

#include "planning/options.h"
#include "planning/rank_topology.h"

namespace equipoise {

// Shares that are level for a window may be as uneven as it takes. A batch then finds ranks whose
// replicas of shared experts have nothing left to give, and others that can take no more. With even
// shares a rank can go both ways; so experts with one replica are swapped until ranks are level
// with even shares, too. That breaks no connection between ranks, since only replicas connect them.
//
// Each swap is the one that lowers the sum of squared loads most for what it costs, of all between
// the fullest rank and another one. A placement that survives a loss has no expert to swap: each
// has two replicas. Ends after `options.headroom` swaps, without copies left, when nothing is gained
// or the fullest rank has room: what it has above the mean is at most an eighth of its load of
// experts with several replicas, which is what shares can take from it.
class HeadroomSwaps {
 public:
    HeadroomSwaps(LayerState& state, const RankTopology& topology, const PlanOptions& options);

    // Returns how many of these copies are left. Leaves the load split evenly.
    std::int64_t run(std::int64_t copies);

 private:
    std::int32_t fullest() const;
    std::int64_t excess(std::int32_t rank) const;
    std::int64_t shared_load(std::int32_t rank) const;
    void find_movable(std::int32_t first, std::int32_t last, std::vector<std::int32_t>& slots);
    bool swap_best(std::int32_t rank);

    LayerState& state_;
    const RankTopology& topology_;
    const PlanOptions& options_;
    std::vector<std::int32_t> here_, everywhere_;
};

}  // namespace equipoise
