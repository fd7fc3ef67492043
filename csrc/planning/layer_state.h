// One layer under planning: which expert is in which slot, and how much load each slot takes.
#pragma once

#include <cstdint>
#include <vector>

#include "common/span.h"

namespace equipoise {

// Bound of loads and heights. Twice as much fits into 64 bits, so that sums of two need no check.
constexpr std::int64_t kMaxLoad = std::int64_t{1} << 62;

// Returns how many tokens a layer may have: all of them on the rank of the least capacity must not
// be higher than kMaxLoad.
std::int64_t max_layer_tokens(Ids capacity);

struct LayerShape {
    std::int32_t experts, slots, ranks;

    std::int32_t per_rank() const { return slots / ranks; }
};

// Words: the *flow* of a slot is the part of its expert's load that it takes; the *load* of a rank
// is the sum of its flows; the *height* of a rank is its load divided by its capacity, so that
// ranks of any capacity are level when their heights are equal.
//
// Loads are tokens << 16; the tokens of a layer are at most max_layer_tokens(capacity). Capacities
// are in 1 / 65536 of an ordinary rank. The flows of an expert's slots sum to its load after every
// call.
class LayerState {
 public:
    // `capacity` by rank; the caller keeps it alive.
    LayerState(LayerShape shape, Ids capacity);

    // Starts with another layer, split evenly.
    void reset(Counts load, Ids placement);

    // Keeps the load and takes another placement, or the same one, split evenly.
    void set_placement(Ids placement);

    // From now on at most `max_changes` slots of a rank may differ from `installed`, which is what
    // the state holds now; the caller keeps it alive. Not enforced here: callers ask may_change
    // before they change a slot, because only they know what else to try.
    void limit_changes(Ids installed, std::int32_t max_changes);
    void clear_change_limit() { installed_ = {nullptr, 0}; }
    bool may_change(std::int32_t slot) const {
        return installed_.data == nullptr || placement_[slot] != installed_[slot] ||
               changes_[rank_of_[slot]] < max_changes_;
    }

    const LayerShape& shape() const { return shape_; }
    std::int32_t rank_of(std::int32_t slot) const { return rank_of_[slot]; }
    std::int32_t expert_at(std::int32_t slot) const { return placement_[slot]; }
    std::int64_t load_of(std::int32_t expert) const { return load_[expert]; }
    std::int64_t flow(std::int32_t slot) const { return flow_[slot]; }
    std::int64_t rank_load(std::int32_t rank) const { return rank_load_[rank]; }
    std::int64_t total() const { return total_; }
    std::int32_t capacity(std::int32_t rank) const { return capacity_[rank]; }
    Ids placement() const { return {placement_.data(), placement_.size()}; }

    // The slots of an expert, ascending.
    Ids replicas(std::int32_t expert) const {
        const std::int32_t first = replica_start_[expert];
        return {replica_slots_.data() + first,
                static_cast<std::size_t>(replica_start_[expert + 1] - first)};
    }
    // The experts with several replicas, ascending. Load can be moved between these only.
    Ids replicated_experts() const {
        return {replicated_experts_.data(), replicated_experts_.size()};
    }
    // The slots of a rank whose experts have other replicas, ascending. Through these load flows to
    // other ranks. fix_flow takes slots out.
    Ids replicated_slots(std::int32_t rank) const {
        return {replicated_slots_.data() + rank * shape_.per_rank(), replicated_count_[rank]};
    }
    bool holds(std::int32_t rank, std::int32_t expert) const;

    // Returns the load of a rank at `height`, rounded up; at most kMaxLoad, which no rank reaches.
    std::int64_t load_at(std::int64_t height, std::int32_t rank) const {
        return uniform_ ? height : scale_to_capacity(height, rank);
    }
    // Returns the lowest height at which ranks of this capacity, together, have room for the load.
    // Most ranks are ordinary ones, and need no division.
    std::int64_t height_of(std::int64_t load, std::int64_t capacity) const {
        return capacity == kShareOne ? load : divide_by_capacity(load, capacity);
    }
    // The height at which all ranks are level.
    std::int64_t mean() const { return mean_; }
    // Loads shifted right by this have a mean below 2^14, so that sums of their squares over all
    // ranks fit into 64 bits (bindings/bind_planning.cpp bounds the sum of capacities for it).
    std::int32_t square_shift() const;

    // Writes, by rank, the load of experts with one replica: what no shares can move away.
    void sum_single_replicas(std::vector<std::int64_t>& single) const;

    // Moves load from one replica of an expert to another.
    void push(std::int32_t from, std::int32_t to, std::int64_t amount);
    // Gives the slot to another expert. The load that the old expert had there goes to its replica
    // on the least loaded rank, so it must have one; the load of the new expert is split evenly.
    void replace(std::int32_t slot, std::int32_t expert);
    // The experts of two slots trade places, and take their flows along.
    void swap(std::int32_t a, std::int32_t b);
    // Sets the flow of a slot for good: until the placement changes, levelling leaves it alone. The
    // caller fixes all slots of the expert, so that their flows sum to its load.
    void fix_flow(std::int32_t slot, std::int64_t flow);
    // Splits the load of all experts, or of one, into equal parts.
    void split_evenly();
    void split_evenly(std::int32_t expert) { split_load(expert); }

 private:
    std::int64_t scale_to_capacity(std::int64_t height, std::int32_t rank) const;
    std::int64_t divide_by_capacity(std::int64_t load, std::int64_t capacity) const;
    void count_changes();
    void set_expert(std::int32_t slot, std::int32_t expert);
    void rebuild_index();
    void move_in_index(std::int32_t slot, std::int32_t previous, std::int32_t expert);
    void note_single(std::int32_t expert);
    void note_replicated(std::int32_t expert, std::int32_t slot);
    void drop_replicated_slot(std::int32_t slot);
    void split_load(std::int32_t expert);
    void set_flow(std::int32_t slot, std::int64_t flow);
    std::int32_t least_loaded_replica(std::int32_t expert, std::int32_t except) const;

    LayerShape shape_;
    Ids capacity_;
    std::int64_t total_capacity_ = 0, total_ = 0, mean_ = 0;
    bool uniform_ = true;
    Ids installed_{nullptr, 0};
    std::int32_t max_changes_ = 0;
    std::vector<std::int32_t> changes_;  // by rank: slots that differ from installed_
    // replica_start_ and replica_slots_ list the slots of each expert, as a routing table does.
    // They are updated in place by replace and swap: to rebuild them would be O(slots) for every
    // change.
    std::vector<std::int32_t> rank_of_, placement_, replica_start_, replica_slots_,
        replicated_slots_, replicated_experts_;
    std::vector<std::size_t>
        replicated_count_;  // by rank: how many of its replicated_slots_ are valid
    std::vector<std::int64_t> load_, flow_, rank_load_;
};

}  // namespace equipoise
