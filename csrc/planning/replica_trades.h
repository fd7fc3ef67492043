// Which expert should get another replica, and which slot should be given up for it.
#pragma once

#include <utility>
#include <vector>

#include "planning/rank_topology.h"
#include "planning/union_find.h"

namespace equipoise {

// Keeps loads per replica, and has to be told of every change of the state.
class ReplicaTrades {
 public:
    ReplicaTrades(const LayerState& state, const RankTopology& topology, std::int32_t node_cost);

    // The state holds another layer or placement.
    void reset();
    // The replicas of this expert changed.
    void update(std::int32_t expert);

    // Returns the expert with the most load per replica of those that may have more, or -1.
    std::int32_t hottest() const;
    std::int64_t load_per_replica(std::int32_t expert) const { return load_per_replica_[expert]; }

    // Returns the slot to give to the expert, on a rank for which `open` is not 0: a replica of
    // another expert, which has at most `most` load per replica without it. -1 if there is none.
    std::int32_t find_slot_for(std::int32_t expert, std::int64_t most,
                               const std::vector<std::int8_t>& open);

 private:
    void add_offers(std::int32_t victim, std::int32_t expert, const std::vector<std::int8_t>& open);
    bool needed_for_survival(std::int32_t victim, std::int32_t slot) const;
    std::int64_t transfer_cost(std::int32_t expert, std::int32_t rank) const;
    std::int32_t count_components(std::int32_t slot, std::int32_t expert);

    const LayerState& state_;
    const RankTopology& topology_;
    std::int32_t node_cost_;
    std::vector<std::int64_t> load_per_replica_;  // by expert; -1 if it may have no more replicas
    std::vector<std::int64_t> price_;             // by expert: its load per replica with one fewer
    std::vector<std::pair<std::int64_t, std::int32_t>> offers_;
    UnionFind connected_;
};

}  // namespace equipoise
