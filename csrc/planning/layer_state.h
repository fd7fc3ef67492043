// One layer under planning: which expert sits in which slot, and what flows there.
#pragma once

#include <cstdint>
#include <vector>

#include "common/span.h"

namespace equipoise {

// Heights and loads are no more than this, so that twice as much fits into 64 bits.
constexpr std::int64_t kMaxLoad = std::int64_t{1} << 62;

// Tokens of a layer at most, so that all of them on the rank of the least capacity are no higher.
std::int64_t max_layer_tokens(Ids capacity);

struct LayerShape {
    std::int32_t experts, slots, ranks;

    std::int32_t per_rank() const { return slots / ranks; }
};

// Loads are tokens << 16; the sum of a layer's tokens is at most most_tokens(capacity).
// A rank of capacity c (in 1 / 65536, 65536 is an ordinary one) takes c / 65536 of what an ordinary
// one takes. The flows into the copies of an expert always sum to its load.
class LayerState {
 public:
    // `capacity` by rank; it outlives the board.
    LayerState(LayerShape shape, Ids capacity);

    // Another layer: every copy of an expert takes the same.
    void reset(Counts load, Ids placement);

    // The same load on another placement, or on this one, evenly.
    void set_placement(Ids placement);

    // From now on at most `most` slots of a rank may hold another expert than in `installed`, which
    // is what the board holds now and outlives its use here. Whoever changes a slot asks first.
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
    // The experts with several copies, ascending.
    Ids replicated_experts() const {
        return {replicated_experts_.data(), replicated_experts_.size()};
    }
    // The slots of a rank whose experts have other copies.
    Ids replicated_slots(std::int32_t rank) const {
        return {replicated_slots_.data() + rank * shape_.per_rank(), replicated_count_[rank]};
    }
    bool holds(std::int32_t rank, std::int32_t expert) const;

    // What the rank may take when an ordinary one takes `height`, rounded up; at most kMostLoad,
    // which no rank takes.
    std::int64_t load_at(std::int64_t height, std::int32_t rank) const {
        return uniform_ ? height : scale_to_capacity(height, rank);
    }
    // The lowest height at which these ranks, with so much load, have room for it.
    std::int64_t height_of(std::int64_t load, std::int64_t capacity) const {
        return capacity == kShareOne ? load : divide_by_capacity(load, capacity);
    }
    // The height at which all ranks are equally full.
    std::int64_t mean() const { return mean_; }
    // Loads >> grain have a mean below 2^14, so that sums of their squares fit into 64 bits.
    std::int32_t square_shift() const;

    // By rank: what the experts with one copy there take.
    void sum_single_replicas(std::vector<std::int64_t>& single) const;

    // Move load from one copy of an expert to another.
    void push(std::int32_t from, std::int32_t to, std::int64_t amount);
    // The slot holds another expert: the old one's load goes to its least full other copy, the new
    // one's is divided evenly among its copies. The old one has another copy.
    void replace(std::int32_t slot, std::int32_t expert);
    // The slots' experts trade places, with what flows there.
    void swap(std::int32_t a, std::int32_t b);
    // The slot takes that, for good: nothing can be poured to it or from it until the placement is
    // another. The flows of its expert have to sum to its load in the end.
    void fix_flow(std::int32_t slot, std::int64_t flow);
    // Every copy of an expert takes the same; of all experts, or of one.
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
    std::vector<std::int32_t> changes_;  // by rank, how many of its slots are not as in original_
    std::vector<std::int32_t> rank_of_, placement_, replica_start_, replica_slots_,
        replicated_slots_, replicated_experts_;
    std::vector<std::size_t> replicated_count_;  // by rank, how many of its joints_ count
    std::vector<std::int64_t> load_, flow_, rank_load_;
};

}  // namespace equipoise
