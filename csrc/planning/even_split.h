// From what is installed to level ranks with few moves, where every expert is split evenly.
#pragma once

#include <vector>

#include "planning/options.h"
#include "planning/rank_topology.h"

namespace equipoise {

// For engines that know no shares. `run` changes the board's placement by at most `copies` copies,
// one change at a time:
// - A slot whose expert is on its rank twice goes over to another expert.
// - As long as a copy takes more than half of what a rank should take, which no packing can hide,
//   its expert gets a slot of one whose copies, one fewer, take less than half of that.
// - For the fullest rank: a slot elsewhere goes over to one of its experts, from one that will not
//   be the hotter of the two by it: one copy, which relieves all ranks that hold the expert. Or two
//   slots trade experts, one of them on this rank: two copies. It is the one that lowers the sum of
//   squares of what ranks have above the mean most, for each copy; copies from another node count
//   for more, where they cost more.
// It ends at the target, where nothing lowers that sum, without copies left, or after as many
// changes as there are slots; with the lowest peak that it came by. Between what is level and what
// is not, the sum knows more than the peak: it sees every rank above the mean, not only the
// fullest.
class EvenSplitPlanner {
 public:
    EvenSplitPlanner(LayerState& state, const RankTopology& topology, const PlanOptions& options);

    // How many copies are left of those.
    std::int64_t run(std::int64_t copies);

    // Of the fullest rank, relative to its capacity.
    std::int64_t peak() const;
    // Whether a rank has two copies of an expert.
    bool has_duplicates() const;

 private:
    // What is gained, in squares for each copy; the slots that change, or a slot and an expert.
    struct Change {
        std::int64_t gain = 0;
        std::int32_t slot = -1, other = -1;
    };
    // How much hotter than what gives up a slot its new expert is.
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
    std::vector<std::int64_t> change_;  // by rank: what it would have more, 0 where untouched
};

}  // namespace equipoise
