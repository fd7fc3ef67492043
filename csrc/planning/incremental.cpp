#include "planning/incremental.h"

#include <algorithm>

namespace equipoise {
namespace {

// It ends after so many steps in a row that lower nothing: several sets of ranks may be as high.
constexpr std::int32_t kPatience = 8;
// Where the target is missed the aim is three quarters of it, so that the next window does not miss
// it at once.
constexpr std::int32_t kAim = 3, kOf = 4;
// So many steps of a call are for the slack.
constexpr std::int32_t kSlack = 1;

}  // namespace

Improver::Improver(Board& board, const Rules& rules, const Aims& aims)
    : board_(board),
      rules_(rules),
      aims_(aims),
      leveller_(board),
      market_(board, rules, aims.node_cost),
      swaps_(board, rules),
      single_(rules.shape.ranks),
      open_(rules.shape.ranks, 1) {}

std::int64_t Improver::run(std::int64_t copies) {
    left_ = copies;
    mean_ = board_.mean();
    traded_ = false;
    target_ = static_cast<std::int32_t>(std::int64_t{aims_.target} * kAim / kOf);
    if (mean_ > 0 && measure() > 0) change();
    leveller_.level_all();
    return left_;
}

void Improver::change() {
    keep(missed_by_);
    market_.reset();
    while (left_ > 0 && trade()) {
    }
    relieve();
    if (missed_by_ > best_) board_.place({kept_.data(), kept_.size()});
}

bool Improver::trade() {
    const std::int32_t hot = market_.hottest();
    if (hot < 0) return false;
    const std::int64_t heat = market_.heat(hot);
    const auto most = static_cast<std::int64_t>(static_cast<__int128>(heat) * kShareOne /
                                                (kShareOne + aims_.hysteresis));
    if (most >= heat) return false;
    std::fill(open_.begin(), open_.end(), 1);
    return take(market_.give_up_for(hot, most, open_), hot);
}

bool Improver::take(std::int32_t slot, std::int32_t expert) {
    if (slot < 0) return false;
    const std::int32_t victim = board_.expert_at(slot);
    board_.replace(slot, expert);
    market_.note(victim);
    market_.note(expert);
    --left_;
    traded_ = true;
    return true;
}

// Until the target is met, and the slack, nothing helps or no copies are left.
void Improver::relieve() {
    std::int64_t least = measure();
    if (traded_ && least <= best_) keep(least);
    std::int32_t idle = 0, slack = kSlack;
    while (least > 0 && idle < kPatience && (stuck_ || slack-- > 0) && step()) {
        const std::int64_t now = measure();
        idle = now < least ? 0 : idle + 1;
        least = std::min(least, now);
        if (now < best_) keep(now);
    }
}

void Improver::keep(std::int64_t missed_by) {
    const Ids placement = board_.placement();
    kept_.assign(placement.begin(), placement.end());
    best_ = missed_by;
}

// How far the aims are missed; 0 when they are met. Leaves the flows level.
std::int64_t Improver::measure() {
    const std::int64_t over = lower() - mean_ - part_of(mean_, target_);
    stuck_ = over > 0;
    // Any that misses the target is worse than any that misses the slack.
    return missed_by_ = stuck_ ? over + mean_ : bound();
}

// How far the slack is missed, by the rank that misses it most.
std::int64_t Improver::bound() {
    board_.add_singles(single_);
    const std::int64_t room = mean_ - part_of(mean_, aims_.slack);
    std::int64_t worst = 0;
    for (std::int32_t r = 0; r < rules_.shape.ranks; ++r) {
        const std::int64_t bound = single_[r] - board_.share(room, r);
        if (bound <= worst) continue;
        worst = bound;
        rank_ = r;
    }
    return worst;
}

// Levels what can be; the peak, and the ranks that it cannot be lowered for.
std::int64_t Improver::lower() {
    const std::int64_t height = leveller_.level(mean_ + part_of(mean_, target_));
    binding_ = leveller_.binding();
    return height;
}

// One change for the rank that misses most; false when there is none.
bool Improver::step() {
    close();
    const std::int32_t hot = hottest_inside();
    const std::int64_t heat = hot < 0 ? 0 : board_.load_of(hot) / copies(hot);
    const std::int32_t slot =
        hot < 0 || copies(hot) >= rules_.copies().high || left_ < 1
            ? -1
            : market_.give_up_for(hot, heat - 1, open_);
    const std::int64_t gain = slot < 0 ? 0 : std::min(excess_, lowered(hot));
    // No swap brings more than the excess, and each is two copies.
    if (2 * gain >= excess_ && gain > 0) return take(slot, hot);
    return swap(2 * gain) || (gain > 0 && take(slot, hot));
}

bool Improver::swap(std::int64_t more_than) {
    if (left_ < 2) return false;
    board_.add_singles(single_);
    const Swap swap = swaps_.best({inside_, open_, single_, excess_, mean_}, more_than);
    if (swap.from < 0) return false;
    board_.swap(swap.from, swap.to);
    left_ -= 2;
    return true;
}

// What another copy takes from the ranks inside: all that it can hold.
std::int64_t Improver::lowered(std::int32_t expert) const {
    return board_.load_of(expert) / (copies(expert) + 1);
}

std::int64_t Improver::copies(std::int32_t expert) const {
    return static_cast<std::int64_t>(board_.copies(expert).size);
}

// What is inside, all that the rank's load can reach, is closed; the others are open.
void Improver::close() {
    std::fill(open_.begin(), open_.end(), 1);
    excess_ = 0;
    inside_.assign(1, rank_);
    if (stuck_) {
        inside_ = binding_;
        for (std::int32_t r : inside_) excess_ += board_.full(r) - board_.share(mean_, r);
    } else {
        const std::int64_t room = mean_ - part_of(mean_, aims_.slack);
        excess_ = single_[rank_] - board_.share(room, rank_) + mean_ / 64;
    }
    for (std::int32_t r : inside_) open_[r] = 0;
}

std::int32_t Improver::hottest_inside() const {
    std::int32_t hot = -1;
    std::int64_t heat = 0;
    const std::int32_t per_rank = rules_.shape.per_rank();
    for (std::int32_t r : inside_)
        for (std::int32_t s = r * per_rank; s < (r + 1) * per_rank; ++s) {
            const std::int32_t e = board_.expert_at(s);
            const std::int64_t copies = this->copies(e);
            // Most experts have one copy: nothing is divided for them.
            const std::int64_t here = copies == 1 ? board_.load_of(e) : board_.load_of(e) / copies;
            if (here > heat && (stuck_ || copies == 1)) {
                heat = here;
                hot = e;
            }
        }
    return hot;
}

}  // namespace equipoise
