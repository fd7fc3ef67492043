#include "planning/layer_planner.h"

#include <algorithm>

#include "planning/greedy.h"
#include "planning/slot_alignment.h"

namespace equipoise {
namespace {

// An attempt pays when it lowers the peak by this part of the target.
constexpr std::int32_t kPays = 8;
// Many copies are more than this part of the slots.
constexpr std::int32_t kDear = 8;

}  // namespace

Worker::Worker(const Request& request, const Answer& answer)
    : request_(request),
      answer_(answer),
      board_(request.rules.shape, request.rules.capacity),
      leveller_(board_),
      improver_(board_, request.rules, request.aims),
      evener_(board_, request.rules, request.aims),
      risk_(board_, request.rules, request.aims, request.windows),
      rounding_(board_),
      fresh_(request.rules.shape.slots) {}

void Worker::plan_anew(std::int64_t layer) {
    propose(layer);
    reset(layer, {fresh_.data(), fresh_.size()});
    settle();
    if (request_.policy != Policy::kGreedy) {
        // Every copy is new, so what is far off can be improved for nothing.
        if (far_off()) change(layer);
        calm(layer, board_.mean() / 1024, INT64_MAX);
    }
    write(layer);
}

bool Worker::keep(std::int64_t layer) {
    reset(layer, installed(layer));
    const std::int64_t copies = request_.allowance[layer];
    bool stays = copies == 0 || !far_off();
    std::int64_t left = copies;
    if (!stays) left = change(layer);
    if (copies == 0) settle();
    if (calm(layer, part_of(board_.mean(), request_.aims.target), left)) stays = false;
    write(layer);
    return stays;
}

void Worker::improve(std::int64_t layer) {
    reset(layer, installed(layer));
    const std::int64_t left = change(layer);
    calm(layer, part_of(board_.mean(), request_.aims.target), left);
    write(layer);
}

Ids Worker::installed(std::int64_t layer) const {
    const auto slots = static_cast<std::size_t>(request_.rules.shape.slots);
    if (request_.installed == nullptr) return {nullptr, 0};
    return {request_.installed + layer * slots, slots};
}

void Worker::reset(std::int64_t layer, Ids placement) {
    board_.lift_limit();
    board_.reset(request_.load_of(layer), placement);
    // Anew, what is installed only says which labels ranks and slots get. And as many changes as a
    // rank has slots are no limit: nothing is counted for it.
    if (request_.policy == Policy::kIncremental && request_.installed != nullptr &&
        request_.per_rank < request_.rules.shape.per_rank())
        board_.limit_changes(placement, request_.per_rank);
}

// Until the target is met, or one more attempt lowers the peak by too little to pay for its copies:
// then what is installed afterwards is where the same loads change nothing. How many copies of the
// allowance are left.
std::int64_t Worker::change(std::int64_t layer) {
    const std::int64_t pays = part_of(board_.mean(), request_.aims.target / kPays);
    std::int64_t left = request_.allowance[layer];
    // Slots that are wasted change hands whatever the peak.
    if (!level() && evener_.doubled()) left = evener_.run(left);
    std::int64_t height = settle();
    while (height > goal() && left > 0) {
        const Attempt attempt = try_to_lower(left);
        if (attempt.height + pays >= height) {
            settle_on(before_);
            break;
        }
        height = attempt.height;
        left = attempt.left;
        // At once, because the order of slots decides between equals: the next attempt, and the
        // next call, start from the same.
        return_to_slots(installed(layer));
    }
    return left;
}

// By the way that goes with the split. Where level shares end far off, or miss the target for many
// copies, also by that of even ones: on any placement the former are at least as level as the
// latter. It mostly takes more copies, which only what is far off is worth.
Worker::Attempt Worker::try_to_lower(std::int64_t copies) {
    note(before_);
    if (!level()) {
        const std::int64_t left = evener_.run(copies);
        return {settle(), left};
    }
    const std::int64_t left = improver_.run(copies);
    const Attempt first{settle(), left};
    const bool dear = copies - first.left > request_.rules.shape.slots / kDear;
    if (first.height <= goal() || (first.height <= far() && !dear)) return first;
    note(other_);
    board_.place({before_.data(), before_.size()});
    const std::int64_t rest = evener_.run(copies);
    const Attempt second{settle(), rest};
    const bool worth = first.height > far() || second.left >= first.left;
    if (second.height < first.height && worth) return second;
    settle_on(other_);
    return first;
}

void Worker::note(std::vector<std::int32_t>& placement) const {
    const Ids now = board_.placement();
    placement.assign(now.begin(), now.end());
}

void Worker::settle_on(const std::vector<std::int32_t>& placement) {
    board_.place({placement.data(), placement.size()});
    settle();
}

// Divides the load as it is to be. Returns the height of the fullest rank.
std::int64_t Worker::settle() { return level() ? leveller_.level_all() : evener_.peak(); }

// Whether experts that are busy together were parted. Levelling changes what copies vary by, so
// the risk is looked at again after it: where it fell by less than the gain nothing changes, so
// that the same loads end up changing nothing.
bool Worker::calm(std::int64_t layer, std::int64_t gain, std::int64_t copies) {
    if (!risk_.known()) return false;
    note(before_);
    const std::int64_t risk = risk_.highest(layer);
    if (risk_.run(layer, gain, copies) == 0) return false;
    settle();
    if (risk_.highest(layer) + gain < risk) return true;
    settle_on(before_);
    return false;
}

// Who is still on its rank, or again, is in its slot: nothing is copied for it.
void Worker::return_to_slots(Ids installed) {
    const Ids now = board_.placement();
    // In steady windows most layers are as they were.
    if (installed.data == nullptr || std::equal(now.begin(), now.end(), installed.begin())) return;
    const auto size = static_cast<std::int32_t>(request_.rules.shape.per_rank());
    const auto slots = static_cast<std::int32_t>(installed.size);
    for (std::int32_t s = 0; s < slots; ++s) {
        const std::int32_t first = s / size * size;
        for (std::int32_t t = first; t < first + size; ++t) {
            const std::int32_t expert = board_.expert_at(s);
            if (expert == installed[s]) break;
            // Each trade puts an expert where it was, so none is undone.
            if (expert == installed[t] && board_.expert_at(t) != expert) {
                board_.swap(s, t);
                t = first - 1;
            }
        }
    }
}

// The target above the mean.
std::int64_t Worker::goal() const {
    return board_.mean() + part_of(board_.mean(), request_.aims.target);
}

// Twice the target above the mean.
std::int64_t Worker::far() const {
    return board_.mean() + 2 * part_of(board_.mean(), request_.aims.target);
}

// Whether the peak is above that, or slots are wasted. If not, what flows is as it is to be.
bool Worker::far_off() {
    if (level()) return leveller_.level_all(far()) > far();
    return evener_.peak() > far() || evener_.doubled();
}

// The plan of a whole layer, into fresh_.
void Worker::propose(std::int64_t layer) {
    const Counts load = request_.load_of(layer);
    const Ids before = installed(layer);
    const std::int64_t ranks = request_.rules.shape.ranks;
    const Span<std::int32_t> fresh{fresh_.data(), fresh_.size()};
    if (request_.policy == Policy::kGreedy)
        plan_greedy(load, ranks, fresh);
    else
        plan_connected(load, request_.rules, fresh);
    // Ranks are alike where nothing tells them apart: then labels are free.
    if (before.data == nullptr || !alike()) return;
    const std::vector<std::int32_t> proposed = fresh_;
    align(before, {proposed.data(), proposed.size()}, ranks, fresh);
}

bool Worker::alike() const {
    const Ids capacity = request_.rules.capacity;
    const bool same = std::all_of(capacity.begin(), capacity.end(),
                                  [&](auto c) { return c == capacity[0]; });
    const Rules& rules = request_.rules;
    return same && (rules.apart != Apart::kNodes || rules.nodes == rules.shape.ranks);
}

void Worker::write(std::int64_t layer) {
    const std::int64_t slots = request_.rules.shape.slots;
    const Span<std::int32_t> shares{answer_.shares + layer * slots,
                                    static_cast<std::size_t>(slots)};
    return_to_slots(installed(layer));
    const Ids placement = board_.placement();
    std::copy(placement.begin(), placement.end(), answer_.placement + layer * slots);
    if (level() && rounding_.fix_coarse()) leveller_.level_all();
    answer_.imbalance[layer] = rounding_.round(shares);
    answer_.moves[layer] = moves(layer);
}

std::int64_t Worker::moves(std::int64_t layer) const {
    const Ids before = installed(layer), after = board_.placement();
    if (before.data == nullptr) return static_cast<std::int64_t>(after.size);
    if (std::equal(before.begin(), before.end(), after.begin())) return 0;
    return count_moves(before, after, request_.rules.shape.ranks);
}

}  // namespace equipoise
