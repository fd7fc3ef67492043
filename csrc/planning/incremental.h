// A plan that starts from the installed placement and changes little.
#pragma once

#include "planning/expert_swaps.h"
#include "planning/max_flow_levelling.h"
#include "planning/options.h"
#include "planning/rank_topology.h"
#include "planning/replica_trades.h"

namespace equipoise {

// `run` changes the placement of a layer that misses the target, by at most `copies` copies:
//
// 1. Replica trades, one copy each: the hottest expert gets a slot of the expert that misses a
//    replica least, as long as it is hotter by the hysteresis. Of the slots that could be given up,
//    one that leaves the ranks connected, on a rank with little load.
// 2. While the target is missed: the ranks that nothing can flow out of (the bottleneck) get a
//    replica of their hottest expert on another rank, one copy; or two experts with one replica
//    trade places across the border, two copies; whichever lowers the peak more per copy. One such
//    change per call is for the slack.
//
// The result is the best placement on the way, the installed one included; its flows are levelled.
class IncrementalPlanner {
 public:
    IncrementalPlanner(LayerState& state, const RankTopology& topology, const PlanOptions& options);

    // Returns how many of these copies are left.
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
    std::vector<std::int8_t> open_;     // by rank: 0 in the bottleneck, whose slots get no replica
    std::vector<std::int32_t> inside_;  // ranks of the bottleneck
    std::vector<std::int32_t> binding_, best_placement_;
};

}  // namespace equipoise
