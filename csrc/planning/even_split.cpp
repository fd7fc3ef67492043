#include "planning/even_split.h"

#include <algorithm>

namespace equipoise {
namespace {

// So many slots are looked at to be handed over: those of the coldest copies.
constexpr std::size_t kLooked = 128;
constexpr std::int64_t kForbidden = INT64_MIN;
// Changes of a layer at most, for each of its slots.
constexpr std::int32_t kSteps = 1;

}  // namespace

Evener::Evener(Board& board, const Rules& rules, const Aims& aims)
    : board_(board), rules_(rules), aims_(aims), change_(rules.shape.ranks) {}

std::int64_t Evener::run(std::int64_t copies) {
    left_ = copies;
    grain_ = board_.grain();
    part_doubles();
    const std::int64_t goal = board_.mean() + part_of(board_.mean(), aims_.target);
    std::int64_t least = peak();
    if (least <= goal) return left_;
    const auto keep = [&] {
        const Ids placement = board_.placement();
        kept_.assign(placement.begin(), placement.end());
        least = peak();
    };
    keep();
    // What a change gains is judged with rounded loads: of few rows, changes may undo each other.
    // So there is an end to them, far beyond where loads of many rows are level.
    std::int32_t steps = kSteps * rules_.shape.slots;
    while (steps-- > 0 && split()) {
    }
    for (bool going = true; going;) {
        if (peak() < least) keep();
        going = least > goal && steps-- > 0 && relieve();
    }
    board_.place({kept_.data(), kept_.size()});
    return left_;
}

std::int64_t Evener::peak() const {
    const std::int32_t rank = fullest();
    return board_.height(board_.full(rank), board_.capacity(rank));
}

std::int32_t Evener::fullest() const {
    std::int32_t found = 0;
    std::int64_t most = -1;
    for (std::int32_t r = 0; r < rules_.shape.ranks; ++r) {
        const std::int64_t height = board_.height(board_.full(r), board_.capacity(r));
        if (height <= most) continue;
        most = height;
        found = r;
    }
    return found;
}

bool Evener::doubled() const {
    for (std::int32_t e : board_.plural()) {
        std::int32_t before = -1;
        for (std::int32_t slot : board_.copies(e)) {
            if (board_.rank_of(slot) == before) return true;
            before = board_.rank_of(slot);
        }
    }
    return false;
}

// To the expert that gains most by it.
void Evener::part_doubles() {
    if (!doubled()) return;
    experts_.resize(rules_.shape.experts);
    for (std::int32_t e = 0; e < rules_.shape.experts; ++e) experts_[e] = e;
    for (std::int32_t slot = 0; slot < rules_.shape.slots && left_ > 0; ++slot) {
        const std::int32_t expert = board_.expert_at(slot), rank = board_.rank_of(slot);
        const Ids copies = board_.copies(expert);
        const auto here = [&](auto s) { return board_.rank_of(s) == rank; };
        if (std::count_if(copies.begin(), copies.end(), here) < 2) continue;
        const Change change =
            handover({experts_.data(), experts_.size()}, {&slot, 1}, Colder::kAny);
        if (change.slot >= 0) give(change.slot, change.other);
    }
}

// One more slot for the expert whose copies are largest; false where none is large.
bool Evener::split() {
    std::int32_t hot = -1;
    std::int64_t most = board_.mean() / 2;
    for (std::int32_t e = 0; e < rules_.shape.experts; ++e) {
        const auto copies = static_cast<std::int32_t>(board_.copies(e).size);
        // A copy is no larger than the load: most experts need no division.
        if (board_.load_of(e) <= most || copies >= rules_.shape.ranks || part(e, 0) <= most)
            continue;
        most = part(e, 0);
        hot = e;
    }
    if (hot < 0 || left_ < 1) return false;
    find_spare(-1);
    const Change change = handover({&hot, 1}, {slots_.data(), slots_.size()}, Colder::kMuchColder);
    if (change.slot < 0) return false;
    give(change.slot, hot);
    return true;
}

// One change for the fullest rank; false where nothing helps.
bool Evener::relieve() {
    const std::int32_t rank = fullest(), per_rank = rules_.shape.per_rank();
    const Ids here{board_.placement().data + rank * per_rank, static_cast<std::size_t>(per_rank)};
    experts_.assign(here.begin(), here.end());
    find_spare(rank);
    const Change hand =
        left_ < 1 ? Change{}
                  : handover({experts_.data(), experts_.size()}, {slots_.data(), slots_.size()},
                             Colder::kColder);
    const Change swap = left_ < 2 ? Change{} : trade(rank);
    if (hand.gain <= 0 && swap.gain <= 0) return false;
    if (hand.gain >= swap.gain)
        give(hand.slot, hand.other);
    else
        exchange(swap.slot, swap.other);
    return true;
}

// The best of these experts, and of these slots to go over to it.
Evener::Change Evener::handover(Ids experts, Ids slots, Colder how) {
    Change best{kForbidden, -1, -1};
    for (std::int32_t expert : experts)
        for (std::int32_t slot : slots) {
            const std::int32_t victim = board_.expert_at(slot), rank = board_.rank_of(slot);
            if (victim == expert || !colder(victim, expert, how) || board_.holds(rank, expert) ||
                !board_.may_change(slot))
                continue;
            const std::int64_t gain = for_each(gain_of(slot, expert), expert, rank);
            if (gain > best.gain) best = {gain, slot, expert};
        }
    return best;
}

// What the squares fall by when the slot goes over to the expert.
std::int64_t Evener::gain_of(std::int32_t slot, std::int32_t expert) {
    const std::int32_t victim = board_.expert_at(slot);
    const std::int64_t raise = part(victim, -1) - part(victim, 0);
    const std::int64_t fall = part(expert, 0) - part(expert, 1);
    for (std::int32_t copy : board_.copies(victim)) add(board_.rank_of(copy), raise);
    for (std::int32_t copy : board_.copies(expert)) add(board_.rank_of(copy), -fall);
    add(board_.rank_of(slot), part(expert, 1) - part(victim, -1));
    std::int64_t gain = 0;
    for (std::int32_t rank : touched_) {
        const std::int64_t before = excess(rank, 0), after = excess(rank, change_[rank]);
        gain += before * before - after * after;
        change_[rank] = 0;
    }
    touched_.clear();
    return gain;
}

void Evener::add(std::int32_t rank, std::int64_t load) {
    // A rank may be noted twice: its change is 0 the second time, and gains nothing.
    if (change_[rank] == 0) touched_.push_back(rank);
    change_[rank] += load;
}

// The best slot of this rank, and of another, to trade experts.
Evener::Change Evener::trade(std::int32_t rank) const {
    Change best;
    const std::int32_t first = rank * rules_.shape.per_rank();
    const std::int64_t ours = excess(rank, 0);
    for (std::int32_t slot = 0; slot < rules_.shape.slots; ++slot) {
        const std::int32_t there = board_.rank_of(slot);
        if (there == rank || !board_.may_change(slot)) continue;
        const std::int64_t theirs = excess(there, 0), before = ours * ours + theirs * theirs;
        for (std::int32_t s = first; s < first + rules_.shape.per_rank(); ++s) {
            const std::int64_t lighter = board_.flow(s) - board_.flow(slot);
            if (lighter <= 0 || !board_.may_change(s)) continue;
            const std::int64_t x = excess(rank, -lighter), y = excess(there, lighter);
            const std::int64_t gain = (before - x * x - y * y) / 2;
            if (gain > best.gain && rules_.may_trade(board_, s, slot)) best = {gain, s, slot};
        }
    }
    if (best.slot < 0 || aims_.node_cost == kShareOne) return best;
    const std::int64_t both = cost(board_.expert_at(best.slot), board_.rank_of(best.other)) +
                              cost(board_.expert_at(best.other), rank);
    best.gain = static_cast<std::int64_t>(static_cast<__int128>(best.gain) * 2 * kShareOne / both);
    return best;
}

void Evener::give(std::int32_t slot, std::int32_t expert) {
    const std::int32_t victim = board_.expert_at(slot);
    board_.replace(slot, expert);
    board_.even(victim);
    --left_;
}

void Evener::exchange(std::int32_t a, std::int32_t b) {
    board_.swap(a, b);
    left_ -= 2;
}

// The slots to hand over, but for those of one rank: those of the coldest copies, coldest first.
void Evener::find_spare(std::int32_t but) {
    slots_.clear();
    for (std::int32_t e : board_.plural())
        for (std::int32_t slot : board_.copies(e))
            if (board_.rank_of(slot) != but && spare(slot)) slots_.push_back(slot);
    const std::size_t looked = std::min(kLooked, slots_.size());
    const auto colder = [&](std::int32_t a, std::int32_t b) {
        const std::int64_t x = board_.flow(a), y = board_.flow(b);
        return x != y ? x < y : a < b;
    };
    std::partial_sort(slots_.begin(), slots_.begin() + looked, slots_.end(), colder);
    slots_.resize(looked);
}

// Whether its expert survives what it has to without this copy.
bool Evener::spare(std::int32_t slot) const {
    const Ids copies = board_.copies(board_.expert_at(slot));
    if (static_cast<std::int32_t>(copies.size) <= rules_.copies().low) return false;
    return rules_.apart != Apart::kNodes || rules_.on_two_nodes(copies, slot);
}

bool Evener::colder(std::int32_t victim, std::int32_t expert, Colder how) const {
    if (how == Colder::kAny) return true;
    return part(victim, -1) * (how == Colder::kColder ? 1 : 2) <= part(expert, 0);
}

// The load of each copy, if there were so many more.
std::int64_t Evener::part(std::int32_t expert, std::int32_t more) const {
    const std::int64_t copies = static_cast<std::int64_t>(board_.copies(expert).size) + more;
    return copies < 2 ? board_.load_of(expert) : board_.load_of(expert) / copies;
}

// What the rank has above the mean, with so much more load; in the units of squares.
std::int64_t Evener::excess(std::int32_t rank, std::int64_t more) const {
    const std::int64_t over = board_.full(rank) + more - board_.share(board_.mean(), rank);
    return std::max<std::int64_t>(over, 0) >> grain_;
}

// The gain of a copy there, in relation to what it costs.
std::int64_t Evener::for_each(std::int64_t gain, std::int32_t expert, std::int32_t rank) const {
    if (aims_.node_cost == kShareOne) return gain;
    return static_cast<std::int64_t>(static_cast<__int128>(gain) * kShareOne / cost(expert, rank));
}

// Of a copy on that rank: more where none is on its node.
std::int64_t Evener::cost(std::int32_t expert, std::int32_t rank) const {
    const Ids copies = board_.copies(expert);
    const bool near = std::any_of(copies.begin(), copies.end(), [&](auto copy) {
        return rules_.node_of(board_.rank_of(copy)) == rules_.node_of(rank);
    });
    return near ? kShareOne : aims_.node_cost;
}

}  // namespace equipoise
