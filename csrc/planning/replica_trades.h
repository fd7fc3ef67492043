// Copies that change hands between experts.
#pragma once

#include <utility>
#include <vector>

#include "planning/rank_topology.h"
#include "planning/union_find.h"

namespace equipoise {

// Finds what to give up for whom. Needs to be told of every change of the board.
class ReplicaTrades {
 public:
    ReplicaTrades(const LayerState& state, const RankTopology& topology, std::int32_t node_cost);

    // The board is another.
    void reset();
    // The copies of this expert changed.
    void update(std::int32_t expert);

    // The expert with the most load per copy that may have more of them; -1 if there is none.
    std::int32_t hottest() const;
    std::int64_t load_per_replica(std::int32_t expert) const { return load_per_replica_[expert]; }

    // The slot to give to the expert: another expert's copy that is missed at `most` at most, by
    // load per copy of what remains; on a rank for which `open` is not 0. -1 if there is none.
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
    std::vector<std::int64_t> load_per_replica_, price_;
    std::vector<std::pair<std::int64_t, std::int32_t>> offers_;
    UnionFind connected_;
};

}  // namespace equipoise
