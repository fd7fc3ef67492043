#include "planning/replica_trades.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "planning/options.h"

namespace equipoise {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
// So many offers are looked at for one that leaves the ranks connected.
constexpr std::size_t kLooked = 6;

}  // namespace

Market::Market(const Board& board, const Rules& rules, std::int32_t node_cost)
    : board_(board),
      rules_(rules),
      node_cost_(node_cost),
      heat_(rules.shape.experts),
      price_(rules.shape.experts),
      joined_(rules.shape.ranks) {}

void Market::reset() {
    for (std::int32_t e = 0; e < rules_.shape.experts; ++e) note(e);
}

void Market::note(std::int32_t expert) {
    const auto copies = static_cast<std::int32_t>(board_.copies(expert).size);
    const std::int64_t load = board_.load_of(expert);
    // Most experts have one copy: nothing is divided for them.
    heat_[expert] = copies >= rules_.copies().high ? -1 : copies == 1 ? load : load / copies;
    price_[expert] = copies <= rules_.copies().low ? kNever : load / (copies - 1);
}

std::int32_t Market::hottest() const {
    const auto found = std::max_element(heat_.begin(), heat_.end());
    return *found < 0 ? -1 : static_cast<std::int32_t>(found - heat_.begin());
}

std::int32_t Market::give_up_for(std::int32_t expert, std::int64_t most,
                                 const std::vector<std::int8_t>& open) {
    offers_.clear();
    for (std::int32_t e : board_.plural())
        if (price_[e] <= most && e != expert) offer(e, expert, open);
    const std::size_t looked = std::min(kLooked, offers_.size());
    std::partial_sort(offers_.begin(), offers_.begin() + looked, offers_.end());
    std::int32_t best = -1, fewest = std::numeric_limits<std::int32_t>::max();
    for (std::size_t i = 0; i < looked && fewest > 1; ++i) {
        const std::int32_t left = components(offers_[i].second, expert);
        if (left < fewest) best = offers_[i].second;
        fewest = std::min(fewest, left);
    }
    return best;
}

// Cheap are copies of what is hardly needed, on ranks that are little filled without them.
void Market::offer(std::int32_t victim, std::int32_t expert, const std::vector<std::int8_t>& open) {
    for (std::int32_t slot : board_.copies(victim)) {
        const std::int32_t rank = board_.rank_of(slot);
        if (!open[rank] || board_.holds(rank, expert) || needed(victim, slot)) continue;
        if (!board_.may_change(slot)) continue;
        const std::int64_t rest = board_.full(rank) - board_.flow(slot);
        offers_.push_back({rest + price_[victim] / 2 + cost(expert, rank), slot});
    }
}

// Whether the expert would not survive the loss of a node without this copy.
bool Market::needed(std::int32_t victim, std::int32_t slot) const {
    return rules_.apart == Apart::kNodes && !rules_.on_two_nodes(board_.copies(victim), slot);
}

// What the way of the copy adds to its price: nothing within a node, and as many sixteenths of a
// rank's mean load as it costs copies more from another one.
std::int64_t Market::cost(std::int32_t expert, std::int32_t rank) const {
    if (node_cost_ == kShareOne) return 0;
    const std::int32_t node = rules_.node_of(rank);
    for (std::int32_t copy : board_.copies(expert))
        if (rules_.node_of(board_.rank_of(copy)) == node) return 0;
    const std::int64_t part = board_.total() / rules_.shape.ranks / 16;
    return part_of(part, node_cost_ - kShareOne);
}

// Into how many components the ranks would fall if the slot held the expert.
std::int32_t Market::components(std::int32_t slot, std::int32_t expert) {
    joined_.clear();
    for (std::int32_t copy : board_.copies(expert))
        joined_.join(board_.rank_of(slot), board_.rank_of(copy));
    for (std::int32_t e : board_.plural()) {
        std::int32_t first = -1;
        for (std::int32_t copy : board_.copies(e)) {
            if (copy == slot) continue;
            const std::int32_t rank = board_.rank_of(copy);
            if (first >= 0) joined_.join(first, rank);
            first = rank;
        }
    }
    return joined_.count();
}

}  // namespace equipoise
