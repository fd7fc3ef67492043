// Plans all layers of a model, on several threads.
#pragma once

#include <vector>

#include "planning/covariance_swaps.h"
#include "planning/incremental.h"
#include "planning/rank_topology.h"

namespace equipoise {

enum class PlanPolicy { kGreedy, kConnected, kIncremental };

// What to plan. Arrays are row by row and belong to the caller.
struct PlanRequest {
    RankTopology topology;
    PlanPolicy policy;
    PlanOptions options;
    std::int64_t layers;
    const std::int64_t* load;       // [layers, experts]
    LoadWindows windows;            // whose sum the load is, or none
    const std::int32_t* installed;  // [layers, slots], or nullptr
    const std::int64_t* allowance;  // [layers]: copies that a layer may need
    std::int32_t per_rank;          // copies of a layer to one rank; no bound on a plan made anew
    std::int32_t threads;

    Counts load_of(std::int64_t layer) const {
        const auto width = static_cast<std::size_t>(topology.shape.experts);
        return {load + layer * width, width};
    }
};

// Where the plan is written. Each layer writes its own rows, so threads need no lock.
struct PlanResult {
    std::int32_t* placement;  // [layers, slots]
    std::int32_t* shares;     // [layers, slots]
    std::int64_t* moves;      // [layers]: experts that their rank did not hold
    std::int64_t* imbalance;  // [layers], in 1 / 65536
};

// Plans every layer by itself, so the number of threads changes nothing but the time.
//
// The incremental policy decides per layer whether to change it at all. A layer that is above the
// mean by more than twice the target is improved in any case; one between once and twice the target
// only if the mean imbalance over all layers misses the target.
void plan_layers(const PlanRequest& request, const PlanResult& result);

}  // namespace equipoise
