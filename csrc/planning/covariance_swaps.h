// Experts that are busy at the same time do not belong on one rank.
#pragma once

#include <vector>

#include "planning/options.h"
#include "planning/rank_topology.h"

namespace equipoise {

// Rows by window: [count, layers, experts]; `count` is 0 where nothing is known.
struct LoadWindows {
    const std::int64_t* data;
    std::int64_t count, layers, experts;

    std::int64_t rows(std::int64_t window, std::int64_t layer, std::int32_t expert) const {
        return data[(window * layers + layer) * experts + expert];
    }
};

// The risk of a rank is its load and `sigma` standard deviations of it over the windows: what its
// experts have in common counts, through the covariance of the windows as it is. `run` has slots
// trade places, two copies each, as long as a rank and a less risky one are both below the risk of
// the former afterwards, by more than `gain`. Ranks are visited by falling risk, and the trade that
// leaves the two lowest is taken.
// With level shares experts with one copy trade places, which leaves joints as they are; with even
// ones any two that leave no expert twice on a rank. Flows are those that the board has; they are
// not levelled anew.
// Source of the idea: the risk term of vllm-ascend's FlashLB policy. Integers throughout.
class CovarianceSwaps {
 public:
    CovarianceSwaps(LayerState& state, const RankTopology& topology, const PlanOptions& options,
                    const LoadWindows& windows);

    // Whether there is anything to know of risks.
    bool enabled() const { return windows_.count > 1 && options_.sigma > 0; }

    // Of the riskiest rank, in units of the board.
    std::int64_t highest_risk(std::int64_t layer);

    // At most so many copies change rank; how many did. `gain` is in units of the board.
    std::int64_t run(std::int64_t layer, std::int64_t gain, std::int64_t copies);

 private:
    struct Candidate {
        std::int64_t risk;  // the higher one of both ranks afterwards
        std::int32_t slot, other;
    };

    void reset(std::int64_t layer);
    void set_slot_deviation(std::int32_t slot);
    // Less risky; of equals the later one.
    bool less_risky(std::int32_t a, std::int32_t b) const {
        return risk_[a] != risk_[b] ? risk_[a] < risk_[b] : a > b;
    }
    bool swap_once(std::int64_t gain);
    Candidate best_swap(std::int32_t rank) const;
    void consider(std::int32_t slot, std::int32_t other, Candidate& best) const;
    void apply_swap(std::int32_t a, std::int32_t b);
    std::int64_t risk_of(std::int32_t rank, std::int64_t extra_load, std::int64_t squares) const;
    std::int64_t squares(std::int32_t rank) const {
        return dot(deviation_of_rank(rank), deviation_of_rank(rank));
    }
    std::int64_t dot(const std::int64_t* a, const std::int64_t* b) const;
    bool movable(std::int32_t slot) const;
    const std::int64_t* deviation_of_slot(std::int32_t slot) const {
        return &slot_deviation_[slot * windows_.count];
    }
    const std::int64_t* deviation_of_rank(std::int32_t rank) const {
        return &rank_deviation_[rank * windows_.count];
    }

    LayerState& state_;
    const RankTopology& topology_;
    const PlanOptions& options_;
    const LoadWindows& windows_;
    std::int32_t shift_ = 0;
    // Deviations by window, in units of 2^grain: of each expert, slot and rank.
    std::vector<std::int64_t> expert_deviation_, slot_deviation_, rank_deviation_, squares_;
    std::vector<std::int64_t> risk_;  // by rank
    std::vector<std::int32_t> order_;
};

}  // namespace equipoise
