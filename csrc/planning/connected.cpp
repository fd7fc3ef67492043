#include "planning/connected.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "planning/node_spread.h"
#include "planning/union_find.h"

namespace equipoise {
namespace {

struct Item {
    std::int64_t size;  // score << 16 per replica
    std::int32_t expert, copies;
};

std::vector<Item> by_size(Counts score, const RankTopology& topology) {
    const std::vector<std::int32_t> copies =
        count_replicas(score, topology.shape.slots, topology.replica_range());
    std::vector<Item> items(score.size);
    for (std::size_t e = 0; e < score.size; ++e)
        items[e] = {score[e] * kShareOne / copies[e], static_cast<std::int32_t>(e), copies[e]};
    std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
        return a.size != b.size ? a.size > b.size : a.expert < b.expert;
    });
    return items;
}

// Where the replicas of an expert were dealt to.
struct DealtReplicas {
    std::int32_t first = -1;  // rank of the first replica
    std::int32_t avoid = -1;  // the node that the last replica must not be on, or -1
};

class ReplicaDealer {
 public:
    ReplicaDealer(const RankTopology& topology, Span<std::int32_t> placement)
        : topology_(topology),
          placement_(placement),
          rank_load_(topology.shape.ranks),
          used_slots_(topology.shape.ranks),
          connected_(topology.shape.ranks) {}

    // Deals all replicas of an expert but one to the next ranks in turn. The last one is kept back:
    // only when all are dealt is it known which ranks are not connected yet.
    DealtReplicas deal_replicas(const Item& item) {
        DealtReplicas dealt;
        for (std::int32_t copy = 1; copy < item.copies; ++copy) {
            const std::int32_t next = next_in_turn(item.expert);
            const std::int32_t rank = next < 0 ? make_room(item, -1) : put(next, item);
            const std::int32_t node =
                topology_.survive == Survive::kNodeLoss ? topology_.node_of(rank) : -1;
            if (dealt.first < 0) dealt = {rank, node};
            // On two nodes already: the last replica may be anywhere.
            if (dealt.avoid != node) dealt.avoid = -1;
            connected_.unite(dealt.first, rank);
        }
        return dealt;
    }

    // Places the last replica of an expert on the best rank: one that is not connected, then the
    // least loaded one.
    void place_last_replica(const Item& item, const DealtReplicas& dealt) {
        std::int32_t best = -1;
        std::pair<bool, std::int64_t> least{};
        for (std::int32_t rank = 0; rank < topology_.shape.ranks; ++rank) {
            if (!free(rank)) continue;
            const bool already_connected = connected_.find(rank) == connected_.find(dealt.first);
            const std::pair cost{already_connected, relative(rank)};
            if (best >= 0 && cost >= least) continue;
            // Checked last: it searches the slots of the rank.
            if (topology_.node_of(rank) == dealt.avoid || holds(rank, item.expert)) continue;
            best = rank;
            least = cost;
        }
        connected_.unite(best < 0 ? make_room(item, dealt.avoid) : put(best, item), dealt.first);
    }

    // Places the experts with one replica, largest first.
    void place_single_replicas(const std::vector<Item>& items) {
        using Rank = std::pair<std::int64_t, std::int32_t>;
        std::priority_queue<Rank, std::vector<Rank>, std::greater<Rank>> heap;
        for (std::int32_t rank = 0; rank < topology_.shape.ranks; ++rank)
            if (free(rank)) heap.push({relative(rank), rank});
        for (const Item& item : items) {
            if (item.copies > 1) continue;
            const std::int32_t rank = heap.top().second;
            heap.pop();
            put(rank, item);
            if (free(rank)) heap.push({relative(rank), rank});
        }
    }

 private:
    bool free(std::int32_t rank) const { return used_slots_[rank] < topology_.shape.per_rank(); }

    bool holds(std::int32_t rank, std::int32_t expert) const {
        const std::int32_t* first = placement_.data + rank * topology_.shape.per_rank();
        return std::find(first, first + used_slots_[rank], expert) != first + used_slots_[rank];
    }

    std::int64_t relative(std::int32_t rank) const {
        const std::int32_t capacity = topology_.capacity[rank];
        if (capacity == kShareOne) return rank_load_[rank];
        return static_cast<std::int64_t>(static_cast<__int128>(rank_load_[rank]) * kShareOne /
                                         capacity);
    }

    // Returns the next rank in turn with a free slot that does not hold the expert, or -1. The turn
    // moves on only if its own rank was taken: a rank that was passed over is asked again for the
    // next expert.
    std::int32_t next_in_turn(std::int32_t expert) {
        for (std::int32_t tried = 0; tried < topology_.shape.ranks; ++tried) {
            const std::int32_t rank = (turn_ + tried) % topology_.shape.ranks;
            if (!free(rank) || holds(rank, expert)) continue;
            if (tried == 0) turn_ = (turn_ + 1) % topology_.shape.ranks;
            return rank;
        }
        return -1;
    }

    // Called when every rank with a free slot holds the expert already. Moves another expert from a
    // rank without it to a free slot, and puts the expert in its place. Returns that rank; or the
    // one with the free slot, which then holds the expert twice, if there are more replicas than
    // ranks. The load of the expert that moved is not carried over: `rank_load_` only orders later
    // choices.
    std::int32_t make_room(const Item& item, std::int32_t avoid) {
        std::int32_t open = 0;
        while (!free(open)) ++open;
        for (std::int32_t rank = 0; rank < topology_.shape.ranks; ++rank) {
            if (topology_.node_of(rank) == avoid || holds(rank, item.expert)) continue;
            const std::int32_t first = rank * topology_.shape.per_rank();
            for (std::int32_t slot = first; slot < first + used_slots_[rank]; ++slot) {
                if (holds(open, placement_[slot])) continue;
                const std::int32_t other = std::exchange(placement_[slot], item.expert);
                placement_[open * topology_.shape.per_rank() + used_slots_[open]++] = other;
                rank_load_[rank] += item.size;
                return rank;
            }
        }
        return put(open, item);
    }

    std::int32_t put(std::int32_t rank, const Item& item) {
        placement_[rank * topology_.shape.per_rank() + used_slots_[rank]++] = item.expert;
        rank_load_[rank] += item.size;
        return rank;
    }

    const RankTopology& topology_;
    Span<std::int32_t> placement_;
    std::vector<std::int64_t> rank_load_;
    std::vector<std::int32_t> used_slots_;
    UnionFind connected_;
    std::int32_t turn_ = 0;
};

}  // namespace

void plan_connected(Counts score, const RankTopology& topology, Span<std::int32_t> placement) {
    const std::vector<Item> items = by_size(score, topology);
    ReplicaDealer dealer(topology, placement);
    std::vector<DealtReplicas> dealt(score.size);
    for (const Item& item : items)
        if (item.copies > 1) dealt[item.expert] = dealer.deal_replicas(item);
    for (const Item& item : items)
        if (item.copies > 1) dealer.place_last_replica(item, dealt[item.expert]);
    dealer.place_single_replicas(items);
    if (topology.survive == Survive::kNodeLoss) spread_over_nodes(score, topology, placement);
}

}  // namespace equipoise
