// The plan for engines that know no shares: every expert is split evenly among its replicas.
#pragma once

#include <vector>

#include "planning/options.h"
#include "planning/rank_topology.h"

namespace equipoise {

// Without shares, load cannot be moved between ranks: balance is packing alone. `run` changes the
// placement by at most `copies` copies, one change at a time:
//
// 1. A slot whose expert is on its rank twice is wasted, and goes to another expert.
// 2. While a replica takes more than half the mean load of a rank, which no packing can hide, its
//    expert gets a slot of an expert whose replicas, one fewer, take less than half of what its own
//    do.
// 3. For the fullest rank: either a slot of another rank goes to one of its experts, from an expert
//    that does not become the hotter of the two: one copy, which relieves every rank that holds the
//    expert. Or two slots trade experts, one of them on this rank: two copies.
//
// In 3 the change is made that lowers most, per copy, the sum over ranks of the squared load above
// the mean; copies from another node count more, if they cost more. The sum rather than the peak,
// because most changes leave the fullest rank as it is: the sum sees every rank above the mean.
//
// Ends at the target, when nothing lowers the sum, without copies left, or after as many changes as
// there are slots; with the placement of the lowest peak on the way.
class EvenSplitPlanner {
 public:
    EvenSplitPlanner(LayerState& state, const RankTopology& topology, const PlanOptions& options);

    // Returns how many of these copies are left.
    std::int64_t run(std::int64_t copies);

    // Returns the height of the fullest rank.
    std::int64_t peak() const;
    // Whether a rank holds an expert twice.
    bool has_duplicates() const;

 private:
    // `gain`: squares per copy. `other`: the expert that gets the slot, or the slot to trade with.
    struct Change {
        std::int64_t gain = 0;
        std::int32_t slot = -1, other = -1;
    };
    // How much hotter a slot's new expert has to be than the expert that gives it up.
    enum class HeatGap { kAny, kColder, kMuchColder };

    std::int32_t fullest() const;
    void replace_duplicates();
    bool split_hottest();
    bool relieve_fullest();
    Change best_handover(Ids experts, Ids slots, HeatGap gap);
    Change best_trade(std::int32_t rank) const;
    std::int64_t gain_of(std::int32_t slot, std::int32_t expert);
    void add_change(std::int32_t rank, std::int64_t load);
    void hand_over(std::int32_t slot, std::int32_t expert);
    void trade_experts(std::int32_t a, std::int32_t b);
    void find_spare_slots(std::int32_t except);
    bool can_spare(std::int32_t slot) const;
    bool cold_enough(std::int32_t victim, std::int32_t expert, HeatGap gap) const;
    std::int64_t load_per_replica(std::int32_t expert, std::int32_t more) const;
    std::int64_t excess(std::int32_t rank, std::int64_t more) const;
    std::int64_t per_cost(std::int64_t gain, std::int32_t expert, std::int32_t rank) const;
    std::int64_t copy_cost(std::int32_t expert, std::int32_t rank) const;

    LayerState& state_;
    const RankTopology& topology_;
    const PlanOptions& options_;
    std::int64_t copies_left_ = 0;
    std::int32_t shift_ = 0;
    std::vector<std::int32_t> best_placement_, slots_, experts_, touched_;
    std::vector<std::int64_t> change_;  // scratch, by rank: load added by a change, 0 between calls
};

}  // namespace equipoise
