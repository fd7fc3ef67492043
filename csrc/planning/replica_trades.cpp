#include "planning/replica_trades.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "planning/options.h"

namespace equipoise {
namespace {

constexpr std::int64_t kNotForSale = std::numeric_limits<std::int64_t>::max();
// How many of the cheapest offers are checked for whether they leave the ranks connected: a check
// goes over all replicas.
constexpr std::size_t kMaxOffers = 6;

}  // namespace

ReplicaTrades::ReplicaTrades(const LayerState& state, const RankTopology& topology,
                             std::int32_t node_cost)
    : state_(state),
      topology_(topology),
      node_cost_(node_cost),
      load_per_replica_(topology.shape.experts),
      price_(topology.shape.experts),
      connected_(topology.shape.ranks) {}

void ReplicaTrades::reset() {
    for (std::int32_t e = 0; e < topology_.shape.experts; ++e) update(e);
}

void ReplicaTrades::update(std::int32_t expert) {
    const auto copies = static_cast<std::int32_t>(state_.replicas(expert).size);
    const std::int64_t load = state_.load_of(expert);
    // Most experts have one replica: nothing is divided for them.
    load_per_replica_[expert] = copies >= topology_.replica_range().high ? -1
                                : copies == 1                            ? load
                                                                         : load / copies;
    price_[expert] = copies <= topology_.replica_range().low ? kNotForSale : load / (copies - 1);
}

std::int32_t ReplicaTrades::hottest() const {
    const auto found = std::max_element(load_per_replica_.begin(), load_per_replica_.end());
    return *found < 0 ? -1 : static_cast<std::int32_t>(found - load_per_replica_.begin());
}

std::int32_t ReplicaTrades::find_slot_for(std::int32_t expert, std::int64_t most,
                                          const std::vector<std::int8_t>& open) {
    offers_.clear();
    for (std::int32_t e : state_.replicated_experts())
        if (price_[e] <= most && e != expert) add_offers(e, expert, open);
    const std::size_t looked = std::min(kMaxOffers, offers_.size());
    std::partial_sort(offers_.begin(), offers_.begin() + looked, offers_.end());
    std::int32_t best = -1, fewest = std::numeric_limits<std::int32_t>::max();
    for (std::size_t i = 0; i < looked && fewest > 1; ++i) {
        const std::int32_t left = count_components(offers_[i].second, expert);
        if (left < fewest) best = offers_[i].second;
        fewest = std::min(fewest, left);
    }
    return best;
}

// Offers the slots of an expert. The price is low on ranks with little load, and for experts that
// hardly miss a replica.
void ReplicaTrades::add_offers(std::int32_t victim, std::int32_t expert,
                               const std::vector<std::int8_t>& open) {
    for (std::int32_t slot : state_.replicas(victim)) {
        const std::int32_t rank = state_.rank_of(slot);
        if (!open[rank] || state_.holds(rank, expert) || needed_for_survival(victim, slot))
            continue;
        if (!state_.may_change(slot)) continue;
        const std::int64_t rest = state_.rank_load(rank) - state_.flow(slot);
        offers_.push_back({rest + price_[victim] / 2 + transfer_cost(expert, rank), slot});
    }
}

// Whether the expert would not survive the loss of a node without this replica.
bool ReplicaTrades::needed_for_survival(std::int32_t victim, std::int32_t slot) const {
    return topology_.survive == Survive::kNodeLoss &&
           !topology_.on_two_nodes(state_.replicas(victim), slot);
}

// What the transfer adds to the price: nothing within a node; from another node a sixteenth of a
// rank's mean load, times what node_cost is above one.
std::int64_t ReplicaTrades::transfer_cost(std::int32_t expert, std::int32_t rank) const {
    if (node_cost_ == kShareOne) return 0;
    const std::int32_t node = topology_.node_of(rank);
    for (std::int32_t copy : state_.replicas(expert))
        if (topology_.node_of(state_.rank_of(copy)) == node) return 0;
    const std::int64_t part = state_.total() / topology_.shape.ranks / 16;
    return fraction_of(part, node_cost_ - kShareOne);
}

// Returns into how many components the ranks would fall if the slot held the expert.
std::int32_t ReplicaTrades::count_components(std::int32_t slot, std::int32_t expert) {
    connected_.clear();
    for (std::int32_t copy : state_.replicas(expert))
        connected_.unite(state_.rank_of(slot), state_.rank_of(copy));
    for (std::int32_t e : state_.replicated_experts()) {
        std::int32_t first = -1;
        for (std::int32_t copy : state_.replicas(e)) {
            if (copy == slot) continue;
            const std::int32_t rank = state_.rank_of(copy);
            if (first >= 0) connected_.unite(first, rank);
            first = rank;
        }
    }
    return connected_.count();
}

}  // namespace equipoise
