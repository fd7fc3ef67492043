// A layer state that is changed, beside one that is rebuilt: test_layer_state.py.

#include <algorithm>
#include <random>
#include <vector>

#include "planning/layer_state.h"

namespace {

using equipoise::Ids;
using equipoise::LayerState;

bool same(Ids a, Ids b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

// Whether both say the same of who is where; flows may differ, but not what they sum to.
bool agree(const LayerState& changed, const LayerState& fresh) {
    bool same_all = same(changed.replicated_experts(), fresh.replicated_experts());
    for (std::int32_t e = 0; e < changed.shape().experts; ++e) {
        std::int64_t flows = 0;
        for (std::int32_t slot : changed.replicas(e)) flows += changed.flow(slot);
        same_all &= same(changed.replicas(e), fresh.replicas(e)) && flows == changed.load_of(e);
    }
    std::int64_t full = 0;
    for (std::int32_t r = 0; r < changed.shape().ranks; ++r) {
        same_all &= same(changed.replicated_slots(r), fresh.replicated_slots(r));
        full += changed.rank_load(r);
    }
    return same_all && full == changed.total();
}

}  // namespace

// Changes a state at random. Returns the number of the first change after which it differs from a
// rebuilt one, or -1.
extern "C" std::int32_t first_difference(std::uint32_t seed, std::int32_t experts,
                                         std::int32_t ranks, std::int32_t per_rank,
                                         std::int32_t changes) {
    std::mt19937 random(seed);
    const std::int32_t slots = ranks * per_rank;
    const auto below = [&](std::int32_t n) { return static_cast<std::int32_t>(random() % n); };
    std::vector<std::int32_t> placement(slots), capacity(ranks, equipoise::kShareOne);
    std::vector<std::int64_t> load(experts);
    for (std::int32_t s = 0; s < slots; ++s) placement[s] = s % experts;
    for (std::int64_t& n : load) n = below(1000);
    LayerState changed({experts, slots, ranks}, {capacity.data(), capacity.size()}),
        fresh = changed;
    changed.reset({load.data(), load.size()}, {placement.data(), placement.size()});
    for (std::int32_t i = 0; i < changes; ++i) {
        const std::int32_t slot = below(slots), other = below(slots), expert = below(experts);
        const std::int32_t victim = changed.expert_at(slot);
        if (i % 2 == 0 && victim != expert && changed.replicas(victim).size > 1)
            changed.replace(slot, expert);
        else if (victim != changed.expert_at(other))
            changed.swap(slot, other);
        fresh.reset({load.data(), load.size()}, changed.placement());
        if (!agree(changed, fresh)) return i;
    }
    return -1;
}
