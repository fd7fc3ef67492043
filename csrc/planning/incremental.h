// A plan that starts from what is installed.
#pragma once

#include "planning/expert_swaps.h"
#include "planning/max_flow_levelling.h"
#include "planning/options.h"
#include "planning/rank_topology.h"
#include "planning/replica_trades.h"

namespace equipoise {

// `run` changes the board's placement by at most `copies` copies, where the target is missed. In
// this order:
// - Copies change hands: from the expert that misses one least to the hottest one, as long as that
//   is hotter, by the hysteresis. Among the copies to give up, one that leaves the ranks
//   connected, on a rank that is little filled.
// - While a rank cannot be levelled to the target, or, for one step, its single copies leave no
//   slack: the ranks that its load can reach get a joint to the others, one copy; or two experts
//   with one copy trade places, two copies; whichever lowers the peak more for each copy.
// What it ends with is the best that it came by, what is installed included.
// The flows that the board is left with are level.
class IncrementalPlanner {
 public:
    IncrementalPlanner(LayerState& state, const RankTopology& topology, const PlanOptions& options);

    // How many copies are left of those.
    std::int64_t run(std::int64_t copies);

 private:
    bool trade_replica();
    bool give_slot(std::int32_t slot, std::int32_t expert);
    void change_placement();
    void lower_peak();
    void save_best(std::int64_t missed_by);
    std::int64_t missed_target();
    std::int64_t missed_slack();
    std::int64_t level_flows();
    bool change_once();
    bool swap_experts(std::int64_t more_than);
    std::int64_t load_of_next_replica(std::int32_t expert) const;
    std::int64_t replica_count(std::int32_t expert) const;
    void find_bottleneck();
    std::int32_t hottest_expert_inside() const;

    LayerState& state_;
    const RankTopology& topology_;
    const PlanOptions& options_;
    MaxFlowLeveller leveller_;
    ReplicaTrades trades_;
    ExpertSwaps swaps_;
    std::int64_t copies_left_ = 0, mean_ = 0, excess_ = 0, missed_by_ = 0, best_miss_ = 0;
    std::int32_t slack_rank_ = 0, target_ = 0;
    bool misses_target_ = false, traded_ = false;
    std::vector<std::int64_t> single_load_;
    std::vector<std::int8_t> open_;
    std::vector<std::int32_t> inside_, binding_, best_placement_;
};

}  // namespace equipoise
