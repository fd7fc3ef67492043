#include "planning/node_spread.h"

#include <cstdlib>
#include <limits>
#include <utility>

namespace equipoise {
namespace {

class NodeSpread {
 public:
    NodeSpread(Counts score, const RankTopology& topology, Span<std::int32_t> placement)
        : score_(score), topology_(topology), placement_(placement) {}

    bool on_one_node(std::int32_t expert) const { return spans(expert, -1, -1) < 2; }

    // Returns the slot that `slot` should trade places with, or -1.
    std::int32_t partner(std::int32_t slot) const {
        std::int32_t best = -1;
        std::int64_t least = std::numeric_limits<std::int64_t>::max();
        for (std::int32_t other = 0; other < topology_.shape.slots; ++other) {
            if (node(other) == node(slot) || !may_swap(slot, other)) continue;
            const std::int64_t differs = std::abs(size(slot) - size(other));
            if (differs >= least) continue;
            least = differs;
            best = other;
        }
        return best;
    }

 private:
    std::int32_t rank(std::int32_t slot) const { return slot / topology_.shape.per_rank(); }
    std::int32_t node(std::int32_t slot) const { return topology_.node_of(rank(slot)); }
    std::int64_t size(std::int32_t slot) const {
        std::int64_t copies = 0;
        for (std::int32_t expert : placement_) copies += expert == placement_[slot];
        return score_[placement_[slot]] / copies;
    }

    // Returns how many nodes an expert would be on, counting to two, if its replica in `from` were
    // in `to`.
    std::int32_t spans(std::int32_t expert, std::int32_t from, std::int32_t to) const {
        std::int32_t first = -1;
        for (std::int32_t slot = 0; slot < topology_.shape.slots; ++slot) {
            if (placement_[slot] != expert) continue;
            const std::int32_t here = node(slot == from ? to : slot);
            if (first >= 0 && here != first) return 2;
            first = here;
        }
        return 1;
    }

    bool holds(std::int32_t rank, std::int32_t expert) const {
        const std::int32_t first = rank * topology_.shape.per_rank();
        for (std::int32_t s = first; s < first + topology_.shape.per_rank(); ++s)
            if (placement_[s] == expert) return true;
        return false;
    }

    bool may_swap(std::int32_t a, std::int32_t b) const {
        return !holds(rank(b), placement_[a]) && !holds(rank(a), placement_[b]) &&
               spans(placement_[b], b, a) > 1;
    }

    Counts score_;
    const RankTopology& topology_;
    Span<std::int32_t> placement_;
};

}  // namespace

void spread_over_nodes(Counts score, const RankTopology& topology, Span<std::int32_t> placement) {
    const NodeSpread spreader(score, topology, placement);
    for (std::int32_t slot = 0; slot < topology.shape.slots; ++slot) {
        if (!spreader.on_one_node(placement[slot])) continue;
        const std::int32_t other = spreader.partner(slot);
        if (other >= 0) std::swap(placement[slot], placement[other]);
    }
}

}  // namespace equipoise
