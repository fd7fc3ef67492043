// Keeps experts that are busy at the same time off one rank.
#pragma once

#include <vector>

#include "planning/options.h"
#include "planning/rank_topology.h"

namespace equipoise {

// Rows by window, [count, layers, experts]; `count` is 0 if only their sum is known.
struct LoadWindows {
    const std::int64_t* data;
    std::int64_t count, layers, experts;

    std::int64_t rows(std::int64_t window, std::int64_t layer, std::int32_t expert) const {
        return data[(window * layers + layer) * experts + expert];
    }
};

// The risk of a rank is its load plus `sigma` standard deviations of it over the windows. The
// deviation is computed from the sum of its experts in each window, so their covariance counts as
// it is, and no covariance matrix has to be kept.
//
// `run` lets the experts of two slots trade places, two copies each, as long as a rank and a less
// risky one both end below the risk of the former by more than `gain`. Ranks are visited by falling
// risk; of the swaps of a rank the one is taken after which the riskier of the two has the least
// risk. With level shares only experts with one replica are swapped, which leaves the connections
// between ranks as they are; with even shares any two that leave no expert twice on a rank. Flows
// move with the experts and are not levelled here.
//
// Source of the idea: the risk term of vllm-ascend's FlashLB policy. Integers throughout.
class CovarianceSwaps {
 public:
    CovarianceSwaps(LayerState& state, const RankTopology& topology, const PlanOptions& options,
                    const LoadWindows& windows);

    // One window has no deviation.
    bool enabled() const { return windows_.count > 1 && options_.sigma > 0; }

    // Returns the risk of the riskiest rank, in the units of loads.
    std::int64_t highest_risk(std::int64_t layer);

    // Moves at most `copies` copies, and returns how many moved. `gain` is in the units of loads.
    std::int64_t run(std::int64_t layer, std::int64_t gain, std::int64_t copies);

 private:
    struct Candidate {
        std::int64_t risk;  // of the riskier one of the two ranks afterwards
        std::int32_t slot, other;
    };

    void reset(std::int64_t layer);
    void set_slot_deviation(std::int32_t slot);
    // A total order, ties to the later rank: sorts give the same result everywhere.
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
    // Deviations from the mean by window, shifted by `shift_`, of each expert, slot and rank; and
    // by rank the sum of their squares.
    std::vector<std::int64_t> expert_deviation_, slot_deviation_, rank_deviation_, squares_;
    std::vector<std::int64_t> risk_;  // by rank
    std::vector<std::int32_t> order_;
};

}  // namespace equipoise
