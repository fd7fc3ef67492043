// Plans for the layers of a model.
#pragma once

#include <vector>

#include "planning/covariance_swaps.h"
#include "planning/incremental.h"
#include "planning/rank_topology.h"

namespace equipoise {

enum class PlanPolicy { kGreedy, kConnected, kIncremental };

// Of all layers, row by row.
struct PlanRequest {
    RankTopology topology;
    PlanPolicy policy;
    PlanOptions options;
    std::int64_t layers;
    const std::int64_t* load;       // [layers, experts]
    LoadWindows windows;            // that the load is the sum of, or none
    const std::int32_t* installed;  // [layers, slots], or nullptr
    const std::int64_t* allowance;  // [layers]: copies that a layer may move
    std::int32_t per_rank;          // copies of a layer that may move to one rank; not anew
    std::int32_t threads;

    Counts load_of(std::int64_t layer) const {
        const auto width = static_cast<std::size_t>(topology.shape.experts);
        return {load + layer * width, width};
    }
};

struct PlanResult {
    std::int32_t* placement;  // [layers, slots]
    std::int32_t* shares;     // [layers, slots]
    std::int64_t* moves;      // [layers]: copies that their rank did not hold
    std::int64_t* imbalance;  // [layers], in 1 / 65536
};

// Anew, every layer by itself. From what is installed: a layer that misses the target by more than
// as much again is improved, whatever the others do; one that misses it by less only where the mean
// over all layers misses it. The threads change nothing.
void plan_layers(const PlanRequest& request, const PlanResult& result);

}  // namespace equipoise
