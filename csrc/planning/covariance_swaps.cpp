#include "planning/covariance_swaps.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace equipoise {
namespace {

// Deviations of a rank are below 2^26, so that the squares of 256 windows fit into 64 bits.
constexpr std::int64_t kLargest = std::int64_t{1} << 26;
// Trades of a layer at most.
constexpr std::int32_t kTrades = 256;

// Rounded down, 0 below 1; exact whatever the processor makes of the first guess.
std::int64_t root(std::int64_t square) {
    if (square < 1) return 0;
    auto found = static_cast<std::int64_t>(std::sqrt(static_cast<double>(square)));
    while (found * found > square) --found;
    while ((found + 1) * (found + 1) <= square) ++found;
    return found;
}

std::int64_t shifted(std::int64_t value, std::int32_t right) {
    return right >= 0 ? value >> right : value * (std::int64_t{1} << -right);
}

}  // namespace

Risk::Risk(Board& board, const Rules& rules, const Aims& aims, const Windows& windows)
    : board_(board), rules_(rules), aims_(aims), windows_(windows) {
    if (!known()) return;
    expert_.resize(rules.shape.experts * windows.count);
    off_.resize(rules.shape.slots * windows.count);
    sum_.resize(rules.shape.ranks * windows.count);
    squares_.resize(rules.shape.ranks);
    risk_.resize(rules.shape.ranks);
    order_.resize(rules.shape.ranks);
}

std::int64_t Risk::run(std::int64_t layer, std::int64_t gain, std::int64_t copies) {
    if (!known() || board_.mean() == 0) return 0;
    reset(layer);
    std::int64_t moved = 0;
    for (std::int32_t i = 0; i < kTrades && moved + 2 <= copies && trade(gain >> grain_); ++i)
        moved += 2;
    return moved;
}

std::int64_t Risk::highest(std::int64_t layer) {
    reset(layer);
    std::int64_t most = 0;
    for (std::int32_t r = 0; r < rules_.shape.ranks; ++r)
        most = std::max(most, risk(r, 0, squares_[r]));
    // A hundred deviations of a load near 2^46 do not fit into 64 bits.
    const auto exact = static_cast<__int128>(most) << grain_;
    return static_cast<std::int64_t>(std::min<__int128>(exact, kMostLoad));
}

// The first that helps; false where none does.
bool Risk::trade(std::int64_t gain) {
    for (std::int32_t r = 0; r < rules_.shape.ranks; ++r) risk_[r] = risk(r, 0, squares_[r]);
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(), [&](auto a, auto b) { return below(b, a); });
    for (std::int32_t rank : order_) {
        const Trade found = best(rank);
        if (found.slot < 0 || found.risk + gain >= risk_[rank]) continue;
        exchange(found.slot, found.other);
        return true;
    }
    return false;
}

void Risk::reset(std::int64_t layer) {
    const std::int64_t count = windows_.count;
    const std::int64_t most = kLargest / rules_.shape.per_rank();
    grain_ = board_.grain();
    for (std::int32_t e = 0; e < rules_.shape.experts; ++e) {
        const std::int64_t total = board_.load_of(e) / kShareOne;
        for (std::int64_t w = 0; w < count; ++w) {
            const std::int64_t off = count * windows_.rows(w, layer, e) - total;
            expert_[e * count + w] = std::clamp(shifted(off, grain_ - 16), -most, most);
        }
    }
    std::fill(sum_.begin(), sum_.end(), 0);
    for (std::int32_t s = 0; s < rules_.shape.slots; ++s) fill_slot(s);
    for (std::int32_t r = 0; r < rules_.shape.ranks; ++r) squares_[r] = squares(r);
}

// A copy varies as its expert does, by its share of it.
void Risk::fill_slot(std::int32_t slot) {
    const std::int32_t expert = board_.expert_at(slot);
    const std::int64_t load = board_.load_of(expert), count = windows_.count;
    const auto share = load == 0 ? 0
                                 : static_cast<std::int64_t>(
                                       static_cast<__int128>(board_.flow(slot)) * kShareOne / load);
    std::int64_t* sum = &sum_[board_.rank_of(slot) * count];
    for (std::int64_t w = 0; w < count; ++w) {
        off_[slot * count + w] = expert_[expert * count + w] * share / kShareOne;
        sum[w] += off_[slot * count + w];
    }
}

Risk::Trade Risk::best(std::int32_t rank) const {
    Trade best{risk_[rank], -1, -1};
    const std::int32_t first = rank * rules_.shape.per_rank();
    for (std::int32_t s = first; s < first + rules_.shape.per_rank(); ++s) {
        if (!movable(s)) continue;
        for (std::int32_t t = 0; t < rules_.shape.slots; ++t)
            if (below(board_.rank_of(t), rank) && movable(t)) look(s, t, best);
    }
    return best;
}

// |a - s + t|^2 = |a|^2 + 2 a (t - s) + |t - s|^2, for both ranks.
void Risk::look(std::int32_t slot, std::int32_t other, Trade& best) const {
    const std::int32_t here = board_.rank_of(slot), there = board_.rank_of(other);
    const std::int64_t heavier = board_.flow(other) - board_.flow(slot);
    // The load alone may be too much.
    if (risk(here, heavier, 0) >= best.risk || risk(there, -heavier, 0) >= best.risk) return;
    const std::int64_t *s = of_slot(slot), *t = of_slot(other);
    const std::int64_t *a = of_rank(here), *b = of_rank(there);
    std::int64_t change = 0, ours = 0, theirs = 0;
    for (std::int64_t w = 0; w < windows_.count; ++w) {
        const std::int64_t d = t[w] - s[w];
        change += d * d;
        ours += a[w] * d;
        theirs += b[w] * d;
    }
    const std::int64_t x = risk(here, heavier, squares_[here] + 2 * ours + change);
    if (x >= best.risk) return;
    const std::int64_t y = risk(there, -heavier, squares_[there] - 2 * theirs + change);
    if (std::max(x, y) < best.risk && rules_.may_trade(board_, slot, other))
        best = {std::max(x, y), slot, other};
}

void Risk::exchange(std::int32_t a, std::int32_t b) {
    for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
        std::int64_t* sum = &sum_[board_.rank_of(from) * windows_.count];
        for (std::int64_t w = 0; w < windows_.count; ++w)
            sum[w] += of_slot(to)[w] - of_slot(from)[w];
    }
    std::swap_ranges(&off_[a * windows_.count], &off_[a * windows_.count] + windows_.count,
                     &off_[b * windows_.count]);
    for (std::int32_t rank : {board_.rank_of(a), board_.rank_of(b)}) squares_[rank] = squares(rank);
    board_.swap(a, b);
}

// Of a rank with so much more load, whose deviations have these squares; relative to its capacity.
std::int64_t Risk::risk(std::int32_t rank, std::int64_t more, std::int64_t squares) const {
    const std::int64_t deviation = root(squares / (windows_.count - 1));
    const std::int64_t load = (board_.full(rank) + more) >> grain_;
    return board_.height(load + deviation * aims_.sigma / kShareOne, board_.capacity(rank));
}

std::int64_t Risk::dot(const std::int64_t* a, const std::int64_t* b) const {
    std::int64_t sum = 0;
    for (std::int64_t w = 0; w < windows_.count; ++w) sum += a[w] * b[w];
    return sum;
}

bool Risk::movable(std::int32_t slot) const {
    if (!board_.may_change(slot)) return false;
    return aims_.split == Split::kEven || board_.copies(board_.expert_at(slot)).size == 1;
}

}  // namespace equipoise
