// Plans for the layers of a model.
#pragma once

#include <vector>

#include "planning/connected.h"
#include "planning/covariance_swaps.h"
#include "planning/incremental.h"

namespace equipoise {

enum class Policy { kGreedy, kConnected, kIncremental };

// Of all layers, row by row.
struct Request {
    Rules rules;
    Policy policy;
    Aims aims;
    std::int64_t layers;
    const std::int64_t* load;        // [layers, experts]
    Windows windows;                 // that the load is the sum of, or none
    const std::int32_t* installed;   // [layers, slots], or nullptr
    const std::int64_t* allowance;   // [layers]: copies that a layer may move
    std::int32_t per_rank;           // copies of a layer that may move to one rank; not anew
    std::int32_t threads;

    Counts load_of(std::int64_t layer) const {
        const auto width = static_cast<std::size_t>(rules.shape.experts);
        return {load + layer * width, width};
    }
};

struct Answer {
    std::int32_t* placement;  // [layers, slots]
    std::int32_t* shares;     // [layers, slots]
    std::int64_t* moves;      // [layers]: copies that their rank did not hold
    std::int64_t* imbalance;  // [layers], in 1 / 65536
};

// Anew, every layer by itself. From what is installed: a layer that misses the target by more than
// as much again is improved, whatever the others do; one that misses it by less only where the mean
// over all layers misses it. The threads change nothing.
void plan_layers(const Request& request, const Answer& answer);

}  // namespace equipoise
