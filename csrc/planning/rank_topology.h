// The ranks that a plan is for, and what must hold of every placement on them.
#pragma once

#include <algorithm>

#include "planning/layer_state.h"
#include "planning/replica_counts.h"

namespace equipoise {

// What the model must survive the loss of: every expert then has replicas on two ranks, or on two
// nodes.
enum class Survive { kNothing, kRankLoss, kNodeLoss };

// Constraints of every plan of a layer, and the ranks it is for. As `RankTopology` in Python.
struct RankTopology {
    LayerShape shape;
    Ids capacity;        // by rank, in 1 / 65536; 65536 is an ordinary one
    std::int32_t nodes;  // divides the ranks
    Survive survive;

    std::int32_t node_of(std::int32_t rank) const { return rank / (shape.ranks / nodes); }
    // Whether these slots without that one are on two nodes.
    bool on_two_nodes(Ids copies, std::int32_t without) const {
        std::int32_t node = -1;
        for (std::int32_t copy : copies) {
            if (copy == without) continue;
            const std::int32_t other = node_of(copy / shape.per_rank());
            if (node >= 0 && other != node) return true;
            node = other;
        }
        return false;
    }
    // Whether the expert of a slot still meets `survive` when this replica of it moves to `rank`.
    // Only the loss of a node is checked: callers never put two replicas on one rank (may_swap).
    bool survives(const LayerState& state, std::int32_t slot, std::int32_t rank) const {
        if (survive != Survive::kNodeLoss) return true;
        for (std::int32_t copy : state.replicas(state.expert_at(slot)))
            if (copy != slot && node_of(state.rank_of(copy)) != node_of(rank)) return true;
        return false;
    }
    // Whether the experts of two slots may trade places: neither rank holds the other's expert
    // already, and both experts still meet `survive`.
    bool may_swap(const LayerState& state, std::int32_t a, std::int32_t b) const {
        const std::int32_t here = state.rank_of(a), there = state.rank_of(b);
        if (!survives(state, a, there) || !survives(state, b, here)) return false;
        return !state.holds(here, state.expert_at(b)) && !state.holds(there, state.expert_at(a));
    }
    // A second replica on the same rank takes no load off it, so an expert has at most one per
    // rank, unless there are more slots than that fills.
    ReplicaRange replica_range() const {
        const std::int32_t forced = (shape.slots + shape.experts - 1) / shape.experts;
        return {survive == Survive::kNothing ? 1 : 2, std::max(shape.ranks, forced)};
    }
};

}  // namespace equipoise
