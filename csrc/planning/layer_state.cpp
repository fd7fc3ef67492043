#include "planning/layer_state.h"

#include <algorithm>
#include <numeric>

#include "planning/share_solver.h"
#include "routing/routing_table.h"

namespace equipoise {

std::int64_t most_tokens(Ids capacity) {
    const std::int32_t least = *std::min_element(capacity.begin(), capacity.end());
    const auto exact = static_cast<__int128>(kMaxTokens) * std::min(least, kShareOne);
    return static_cast<std::int64_t>(exact / kShareOne);
}

Board::Board(Shape shape, Ids capacity)
    : shape_(shape),
      capacity_(capacity),
      whole_(std::accumulate(capacity.begin(), capacity.end(), std::int64_t{0})),
      uniform_(std::all_of(capacity.begin(), capacity.end(),
                           [](auto c) { return c == kShareOne; })),
      changed_(shape.ranks),
      owner_(shape.slots),
      placement_(shape.slots),
      start_(shape.experts + 1),
      slots_(shape.slots),
      joints_(shape.slots),
      joined_(shape.ranks),
      load_(shape.experts),
      flow_(shape.slots),
      full_(shape.ranks) {
    for (std::int32_t s = 0; s < shape.slots; ++s) owner_[s] = s / shape.per_rank();
}

void Board::reset(Counts load, Ids placement) {
    total_ = 0;
    for (std::int32_t e = 0; e < shape_.experts; ++e) {
        load_[e] = load[e] * kShareOne;
        total_ += load_[e];
    }
    mean_ = height(total_, whole_);
    place(placement);
}

void Board::place(Ids placement) {
    if (placement.data != placement_.data())
        std::copy(placement.begin(), placement.end(), placement_.begin());
    count_changed();
    index();
    even();
}

void Board::limit_changes(Ids installed, std::int32_t most) {
    original_ = installed;
    most_ = most;
    count_changed();
}

void Board::count_changed() {
    if (original_.data == nullptr) return;
    std::fill(changed_.begin(), changed_.end(), 0);
    for (std::int32_t s = 0; s < shape_.slots; ++s) changed_[owner_[s]] += placement_[s] != original_[s];
}

// The slot's expert is another one.
void Board::hold(std::int32_t slot, std::int32_t expert) {
    if (original_.data != nullptr)
        changed_[owner_[slot]] += (expert != original_[slot]) - (placement_[slot] != original_[slot]);
    placement_[slot] = expert;
}

void Board::index() {
    sort_slots(placement(), {start_.data(), start_.size()}, {slots_.data(), slots_.size()});
    plural_.clear();
    for (std::int32_t e = 0; e < shape_.experts; ++e)
        if (start_[e + 1] - start_[e] > 1) plural_.push_back(e);
    std::fill(joined_.begin(), joined_.end(), 0);
    for (std::int32_t s = 0; s < shape_.slots; ++s) {
        const std::int32_t expert = placement_[s], rank = owner_[s];
        if (start_[expert + 1] - start_[expert] > 1)
            joints_[rank * shape_.per_rank() + joined_[rank]++] = s;
    }
}

void Board::even() {
    std::fill(full_.begin(), full_.end(), 0);
    for (std::int32_t e = 0; e < shape_.experts; ++e) {
        const std::int32_t slot = slots_[start_[e]];
        flow_[slot] = load_[e];
        full_[owner_[slot]] += load_[e];
    }
    for (std::int32_t e : plural_) {
        for (std::int32_t slot : copies(e)) {
            if (slot != slots_[start_[e]]) flow_[slot] = 0;
        }
        spread(e);
    }
}

void Board::spread(std::int32_t expert) {
    const Ids slots = copies(expert);
    if (slots.size == 1) return set(slots[0], load_[expert]);
    const auto count = static_cast<std::int64_t>(slots.size);
    std::int64_t rest = load_[expert] % count;
    for (std::int32_t slot : slots) {
        set(slot, load_[expert] / count + rest);
        rest = 0;
    }
}

void Board::set(std::int32_t slot, std::int64_t flow) {
    full_[owner_[slot]] += flow - flow_[slot];
    flow_[slot] = flow;
}

bool Board::holds(std::int32_t rank, std::int32_t expert) const {
    const Ids slots = copies(expert);
    return std::any_of(slots.begin(), slots.end(), [&](auto s) { return owner_[s] == rank; });
}

std::int64_t Board::scaled(std::int64_t height, std::int32_t rank) const {
    const auto exact = static_cast<__int128>(height) * capacity_[rank];
    return static_cast<std::int64_t>(std::min<__int128>((exact + kShareOne - 1) / kShareOne, kMostLoad));
}

std::int64_t Board::quotient(std::int64_t load, std::int64_t capacity) const {
    const auto exact = static_cast<__int128>(load) * kShareOne;
    return static_cast<std::int64_t>((exact + capacity - 1) / capacity);
}

std::int32_t Board::grain() const {
    std::int32_t grain = 0;
    while (mean_ >> grain >= std::int64_t{1} << 14) ++grain;
    return grain;
}

void Board::add_singles(std::vector<std::int64_t>& single) const {
    single = full_;
    for (std::int32_t e : plural_)
        for (std::int32_t slot : copies(e)) single[owner_[slot]] -= flow_[slot];
}

void Board::pour(std::int32_t from, std::int32_t to, std::int64_t amount) {
    flow_[from] -= amount;
    flow_[to] += amount;
    full_[owner_[from]] -= amount;
    full_[owner_[to]] += amount;
}

std::int32_t Board::least_full(std::int32_t expert, std::int32_t but) const {
    std::int32_t best = -1;
    for (std::int32_t s : copies(expert))
        if (s != but && (best < 0 || full_[owner_[s]] < full_[owner_[best]])) best = s;
    return best;
}

void Board::replace(std::int32_t slot, std::int32_t expert) {
    const std::int32_t victim = placement_[slot];
    pour(slot, least_full(victim, slot), flow_[slot]);
    hold(slot, expert);
    list(slot, victim, expert);
    if (copies(victim).size == 1) part(victim);
    if (copies(expert).size == 2) join(expert, copies(expert)[copies(expert)[0] == slot]);
    spread(expert);
}

// The slot leaves the run of one expert for that of the other; those between make way.
void Board::list(std::int32_t slot, std::int32_t victim, std::int32_t expert) {
    const auto run = [&](std::int32_t e) { return slots_.begin() + start_[e]; };
    const auto at = std::lower_bound(run(victim), run(victim + 1), slot);
    const auto to = std::lower_bound(run(expert), run(expert + 1), slot);
    if (victim < expert) {
        std::rotate(at, at + 1, to);
        for (std::int32_t e = victim + 1; e <= expert; ++e) --start_[e];
    } else {
        std::rotate(to, at, at + 1);
        for (std::int32_t e = expert + 1; e <= victim; ++e) ++start_[e];
    }
}

// The expert has one copy now: nothing can be poured from it.
void Board::part(std::int32_t expert) {
    plural_.erase(std::lower_bound(plural_.begin(), plural_.end(), expert));
    leave(copies(expert)[0]);
}

// The slot is no joint of its rank any more.
void Board::leave(std::int32_t slot) {
    const std::int32_t rank = owner_[slot];
    auto* first = joints_.data() + rank * shape_.per_rank();
    auto* last = first + joined_[rank]--;
    auto* at = std::lower_bound(first, last, slot);
    std::copy(at + 1, last, at);
}

void Board::fix(std::int32_t slot, std::int64_t flow) {
    set(slot, flow);
    leave(slot);
}

// The expert has a second copy now; the first one is in that slot.
void Board::join(std::int32_t expert, std::int32_t slot) {
    plural_.insert(std::lower_bound(plural_.begin(), plural_.end(), expert), expert);
    const std::int32_t rank = owner_[slot];
    auto* first = joints_.data() + rank * shape_.per_rank();
    auto* last = first + joined_[rank]++;
    auto* at = std::lower_bound(first, last, slot);
    std::copy_backward(at, last, last + 1);
    *at = slot;
}

void Board::swap(std::int32_t a, std::int32_t b) {
    const std::int64_t first = flow_[a], second = flow_[b];
    const std::int32_t left = placement_[a], right = placement_[b];
    hold(a, right);
    hold(b, left);
    set(a, second);
    set(b, first);
    if (copies(left).size > 1 || copies(right).size > 1) return index();
    slots_[start_[left]] = b;
    slots_[start_[right]] = a;
}

}  // namespace equipoise
