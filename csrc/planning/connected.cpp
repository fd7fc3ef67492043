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
    std::int64_t size;  // score << 16 per copy
    std::int32_t expert, copies;
};

std::vector<Item> by_size(Counts score, const Rules& rules) {
    const std::vector<std::int32_t> copies =
        count_copies(score, rules.shape.slots, rules.copies());
    std::vector<Item> items(score.size);
    for (std::size_t e = 0; e < score.size; ++e)
        items[e] = {score[e] * kShareOne / copies[e], static_cast<std::int32_t>(e), copies[e]};
    std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
        return a.size != b.size ? a.size > b.size : a.expert < b.expert;
    });
    return items;
}

// Where the copies of an expert that were dealt are.
struct Dealt {
    std::int32_t first = -1;  // rank of the first one
    std::int32_t avoid = -1;  // the node that the last one must not be on
};

class Dealer {
 public:
    Dealer(const Rules& rules, Span<std::int32_t> placement)
        : rules_(rules),
          placement_(placement),
          full_(rules.shape.ranks),
          used_(rules.shape.ranks),
          joined_(rules.shape.ranks) {}

    // All copies but one of an expert, to the next ranks in turn.
    Dealt deal(const Item& item) {
        Dealt dealt;
        for (std::int32_t copy = 1; copy < item.copies; ++copy) {
            const std::int32_t next = next_in_turn(item.expert);
            const std::int32_t rank = next < 0 ? make_room(item, -1) : put(next, item);
            const std::int32_t node = rules_.apart == Apart::kNodes ? rules_.node_of(rank) : -1;
            if (dealt.first < 0) dealt = {rank, node};
            if (dealt.avoid != node) dealt.avoid = -1;
            joined_.join(dealt.first, rank);
        }
        return dealt;
    }

    // The last copy of an expert.
    void link(const Item& item, const Dealt& dealt) {
        std::int32_t best = -1;
        std::pair<bool, std::int64_t> least{};
        for (std::int32_t rank = 0; rank < rules_.shape.ranks; ++rank) {
            if (!free(rank)) continue;
            const bool useless = joined_.root(rank) == joined_.root(dealt.first);
            const std::pair cost{useless, relative(rank)};
            if (best >= 0 && cost >= least) continue;
            if (rules_.node_of(rank) == dealt.avoid || holds(rank, item.expert)) continue;
            best = rank;
            least = cost;
        }
        joined_.join(best < 0 ? make_room(item, dealt.avoid) : put(best, item), dealt.first);
    }

    // The experts with one copy, largest first.
    void fill(const std::vector<Item>& items) {
        using Rank = std::pair<std::int64_t, std::int32_t>;
        std::priority_queue<Rank, std::vector<Rank>, std::greater<Rank>> heap;
        for (std::int32_t rank = 0; rank < rules_.shape.ranks; ++rank)
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
    bool free(std::int32_t rank) const { return used_[rank] < rules_.shape.per_rank(); }

    bool holds(std::int32_t rank, std::int32_t expert) const {
        const std::int32_t* first = placement_.data + rank * rules_.shape.per_rank();
        return std::find(first, first + used_[rank], expert) != first + used_[rank];
    }

    std::int64_t relative(std::int32_t rank) const {
        const std::int32_t capacity = rules_.capacity[rank];
        if (capacity == kShareOne) return full_[rank];
        return static_cast<std::int64_t>(static_cast<__int128>(full_[rank]) * kShareOne / capacity);
    }

    // The next rank in turn with a free slot that does not hold the expert, or -1.
    std::int32_t next_in_turn(std::int32_t expert) {
        for (std::int32_t tried = 0; tried < rules_.shape.ranks; ++tried) {
            const std::int32_t rank = (turn_ + tried) % rules_.shape.ranks;
            if (!free(rank) || holds(rank, expert)) continue;
            if (tried == 0) turn_ = (turn_ + 1) % rules_.shape.ranks;
            return rank;
        }
        return -1;
    }

    // Every rank with a free slot holds the expert already, so another expert moves there from a
    // rank that does not, and leaves its slot. That rank; or the one with the free slot, when there
    // are more copies than ranks that could take them.
    std::int32_t make_room(const Item& item, std::int32_t avoid) {
        std::int32_t open = 0;
        while (!free(open)) ++open;
        for (std::int32_t rank = 0; rank < rules_.shape.ranks; ++rank) {
            if (rules_.node_of(rank) == avoid || holds(rank, item.expert)) continue;
            const std::int32_t first = rank * rules_.shape.per_rank();
            for (std::int32_t slot = first; slot < first + used_[rank]; ++slot) {
                if (holds(open, placement_[slot])) continue;
                const std::int32_t other = std::exchange(placement_[slot], item.expert);
                placement_[open * rules_.shape.per_rank() + used_[open]++] = other;
                full_[rank] += item.size;
                return rank;
            }
        }
        return put(open, item);
    }

    std::int32_t put(std::int32_t rank, const Item& item) {
        placement_[rank * rules_.shape.per_rank() + used_[rank]++] = item.expert;
        full_[rank] += item.size;
        return rank;
    }

    const Rules& rules_;
    Span<std::int32_t> placement_;
    std::vector<std::int64_t> full_;
    std::vector<std::int32_t> used_;
    Components joined_;
    std::int32_t turn_ = 0;
};

}  // namespace

void plan_connected(Counts score, const Rules& rules, Span<std::int32_t> placement) {
    const std::vector<Item> items = by_size(score, rules);
    Dealer dealer(rules, placement);
    std::vector<Dealt> dealt(score.size);
    for (const Item& item : items)
        if (item.copies > 1) dealt[item.expert] = dealer.deal(item);
    for (const Item& item : items)
        if (item.copies > 1) dealer.link(item, dealt[item.expert]);
    dealer.fill(items);
    if (rules.apart == Apart::kNodes) spread_over_nodes(score, rules, placement);
}

}  // namespace equipoise
