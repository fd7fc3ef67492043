// A whole plan, whose copies connect all ranks.
#pragma once

#include <algorithm>
#include <vector>

#include "planning/layer_state.h"
#include "planning/replica_counts.h"

namespace equipoise {

// Where the copies of one expert may not be all together.
enum class Apart { kNothing, kRanks, kNodes };

// What binds every plan of a layer.
struct Rules {
    Shape shape;
    Ids capacity;        // by rank, in 1 / 65536; 65536 is an ordinary one
    std::int32_t nodes;  // divides the ranks
    Apart apart;         // what an expert must survive the loss of

    std::int32_t node_of(std::int32_t rank) const { return rank / (shape.ranks / nodes); }
    // Whether these copies without that one are on two nodes.
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
    // Whether the expert of a slot is on two nodes, where it has to be, once this copy of it is on
    // that rank: whether another copy is on another node.
    bool survives(const Board& board, std::int32_t slot, std::int32_t rank) const {
        if (apart != Apart::kNodes) return true;
        for (std::int32_t copy : board.copies(board.expert_at(slot)))
            if (copy != slot && node_of(board.rank_of(copy)) != node_of(rank)) return true;
        return false;
    }
    // Whether the experts of two slots may trade places: neither rank holds the other's already,
    // and both experts survive what they have to.
    bool may_trade(const Board& board, std::int32_t a, std::int32_t b) const {
        const std::int32_t here = board.rank_of(a), there = board.rank_of(b);
        if (!survives(board, a, there) || !survives(board, b, here)) return false;
        return !board.holds(here, board.expert_at(b)) && !board.holds(there, board.expert_at(a));
    }
    // How many copies an expert must and may have: one a rank at most, unless there are more slots.
    Range copies() const {
        const std::int32_t forced = (shape.slots + shape.experts - 1) / shape.experts;
        return {apart == Apart::kNothing ? 1 : 2, std::max(shape.ranks, forced)};
    }
};

// Ranks are joined by the experts that they both hold: load flows along these joints when shares
// are solved, so a batch can be levelled over all ranks that are connected, and over no others.
// - Copies by count_copies of `score`; experts by score per copy, descending, then by id.
// - All but one copy of each expert are dealt to the ranks in turn, so that each rank has a joint.
// - Of each of these experts the last copy goes to a rank of another component, as long as there is
//   one: to the least full of them.
// - Experts with one copy follow, each to the least full rank.
// No rank gets two copies of an expert, where slots <= experts * ranks. Ties go to the lower rank.
// "Full" is by score, relative to capacity. Writes the expert of each slot.
void plan_connected(Counts score, const Rules& rules, Span<std::int32_t> placement);

}  // namespace equipoise
