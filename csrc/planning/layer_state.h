// One layer under planning: which expert sits in which slot, and what flows there.
#pragma once

#include <cstdint>
#include <vector>

#include "common/span.h"

namespace equipoise {

// Heights and loads are no more than this, so that twice as much fits into 64 bits.
constexpr std::int64_t kMostLoad = std::int64_t{1} << 62;

// Tokens of a layer at most, so that all of them on the rank of the least capacity are no higher.
std::int64_t most_tokens(Ids capacity);

struct Shape {
    std::int32_t experts, slots, ranks;

    std::int32_t per_rank() const { return slots / ranks; }
};

// Loads are tokens << 16; the sum of a layer's tokens is at most most_tokens(capacity).
// A rank of capacity c (in 1 / 65536, 65536 is an ordinary one) takes c / 65536 of what an ordinary
// one takes. The flows into the copies of an expert always sum to its load.
class Board {
 public:
    // `capacity` by rank; it outlives the board.
    Board(Shape shape, Ids capacity);

    // Another layer: every copy of an expert takes the same.
    void reset(Counts load, Ids placement);

    // The same load on another placement, or on this one, evenly.
    void place(Ids placement);

    // From now on at most `most` slots of a rank may hold another expert than in `installed`, which
    // is what the board holds now and outlives its use here. Whoever changes a slot asks first.
    void limit_changes(Ids installed, std::int32_t most);
    void lift_limit() { original_ = {nullptr, 0}; }
    bool may_change(std::int32_t slot) const {
        return original_.data == nullptr || placement_[slot] != original_[slot] ||
               changed_[owner_[slot]] < most_;
    }

    const Shape& shape() const { return shape_; }
    std::int32_t rank_of(std::int32_t slot) const { return owner_[slot]; }
    std::int32_t expert_at(std::int32_t slot) const { return placement_[slot]; }
    std::int64_t load_of(std::int32_t expert) const { return load_[expert]; }
    std::int64_t flow(std::int32_t slot) const { return flow_[slot]; }
    std::int64_t full(std::int32_t rank) const { return full_[rank]; }
    std::int64_t total() const { return total_; }
    std::int32_t capacity(std::int32_t rank) const { return capacity_[rank]; }
    Ids placement() const { return {placement_.data(), placement_.size()}; }

    // The slots of an expert, ascending.
    Ids copies(std::int32_t expert) const {
        const std::int32_t first = start_[expert];
        return {slots_.data() + first, static_cast<std::size_t>(start_[expert + 1] - first)};
    }
    // The experts with several copies, ascending.
    Ids plural() const { return {plural_.data(), plural_.size()}; }
    // The slots of a rank whose experts have other copies.
    Ids joints(std::int32_t rank) const {
        return {joints_.data() + rank * shape_.per_rank(), joined_[rank]};
    }
    bool holds(std::int32_t rank, std::int32_t expert) const;

    // What the rank may take when an ordinary one takes `height`, rounded up; at most kMostLoad, which
    // no rank takes.
    std::int64_t share(std::int64_t height, std::int32_t rank) const {
        return uniform_ ? height : scaled(height, rank);
    }
    // The lowest height at which these ranks, with so much load, have room for it.
    std::int64_t height(std::int64_t load, std::int64_t capacity) const {
        return capacity == kShareOne ? load : quotient(load, capacity);
    }
    // The height at which all ranks are equally full.
    std::int64_t mean() const { return mean_; }
    // Loads >> grain have a mean below 2^14, so that sums of their squares fit into 64 bits.
    std::int32_t grain() const;

    // By rank: what the experts with one copy there take.
    void add_singles(std::vector<std::int64_t>& single) const;

    // Move load from one copy of an expert to another.
    void pour(std::int32_t from, std::int32_t to, std::int64_t amount);
    // The slot holds another expert: the old one's load goes to its least full other copy, the new
    // one's is divided evenly among its copies. The old one has another copy.
    void replace(std::int32_t slot, std::int32_t expert);
    // The slots' experts trade places, with what flows there.
    void swap(std::int32_t a, std::int32_t b);
    // The slot takes that, for good: nothing can be poured to it or from it until the placement is
    // another. The flows of its expert have to sum to its load in the end.
    void fix(std::int32_t slot, std::int64_t flow);
    // Every copy of an expert takes the same; of all experts, or of one.
    void even();
    void even(std::int32_t expert) { spread(expert); }

 private:
    std::int64_t scaled(std::int64_t height, std::int32_t rank) const;
    std::int64_t quotient(std::int64_t load, std::int64_t capacity) const;
    void count_changed();
    void hold(std::int32_t slot, std::int32_t expert);
    void index();
    void list(std::int32_t slot, std::int32_t victim, std::int32_t expert);
    void part(std::int32_t expert);
    void join(std::int32_t expert, std::int32_t slot);
    void leave(std::int32_t slot);
    void spread(std::int32_t expert);
    void set(std::int32_t slot, std::int64_t flow);
    std::int32_t least_full(std::int32_t expert, std::int32_t but) const;

    Shape shape_;
    Ids capacity_;
    std::int64_t whole_ = 0, total_ = 0, mean_ = 0;
    bool uniform_ = true;
    Ids original_{nullptr, 0};
    std::int32_t most_ = 0;
    std::vector<std::int32_t> changed_;  // by rank, how many of its slots are not as in original_
    std::vector<std::int32_t> owner_, placement_, start_, slots_, joints_, plural_;
    std::vector<std::size_t> joined_;  // by rank, how many of its joints_ count
    std::vector<std::int64_t> load_, flow_, full_;
};

}  // namespace equipoise
