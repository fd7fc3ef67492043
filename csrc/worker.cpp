#include "worker.h"

#include <algorithm>

#include "labels.h"
#include "planner.h"

namespace equipoise {

Worker::Worker(const Request& request, const Answer& answer)
    : request_(request),
      answer_(answer),
      board_(request.rules.shape, request.rules.capacity),
      leveller_(board_),
      improver_(board_, request.rules, request.aims),
      evener_(board_, request.rules, request.aims),
      rounding_(board_),
      fresh_(request.rules.shape.slots) {}

void Worker::plan_anew(std::int64_t layer) {
    propose(layer);
    reset(layer, {fresh_.data(), fresh_.size()});
    if (level()) leveller_.level_all();
    write(layer);
}

bool Worker::keep(std::int64_t layer) {
    reset(layer, installed(layer));
    const bool fixed = request_.allowance[layer] == 0;
    const bool stays = fixed || !far_off();
    if (!stays) change(layer);
    if (fixed && level()) leveller_.level_all();
    write(layer);
    return stays;
}

void Worker::improve(std::int64_t layer) {
    reset(layer, installed(layer));
    change(layer);
    write(layer);
}

Ids Worker::installed(std::int64_t layer) const {
    const auto slots = static_cast<std::size_t>(request_.rules.shape.slots);
    if (request_.installed == nullptr) return {nullptr, 0};
    return {request_.installed + layer * slots, slots};
}

void Worker::reset(std::int64_t layer, Ids placement) {
    board_.reset(request_.row(request_.load, layer), placement);
}

void Worker::change(std::int64_t layer) {
    const Counts score = request_.row(request_.score, layer);
    if (level()) {
        improver_.run(score, request_.allowance[layer]);
    } else {
        // What is split evenly is packed by score.
        board_.reset(score, board_.placement());
        evener_.run(request_.allowance[layer]);
        reset(layer, board_.placement());
    }
    return_to_slots(installed(layer));
}

// Who is still on its rank, or again, is in its slot: nothing is copied for it.
void Worker::return_to_slots(Ids installed) {
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

// Whether the peak is more than twice the target above the mean, or slots are wasted. If not, what
// flows is as it is to be.
bool Worker::far_off() {
    const std::int64_t far = board_.mean() + 2 * part_of(board_.mean(), request_.aims.target);
    if (level()) return leveller_.level_all(far) > far;
    return evener_.peak() > far || evener_.doubled();
}

// The plan of a whole layer, into fresh_.
void Worker::propose(std::int64_t layer) {
    const Counts score = request_.row(request_.score, layer);
    const Ids before = installed(layer);
    const std::int64_t ranks = request_.rules.shape.ranks;
    const Span<std::int32_t> fresh{fresh_.data(), fresh_.size()};
    if (request_.policy == Policy::kGreedy)
        plan_greedy(score, ranks, fresh);
    else
        plan_connected(score, request_.rules, fresh);
    // Ranks are alike where nothing tells them apart: then labels are free.
    if (before.data == nullptr || !alike()) return;
    const std::vector<std::int32_t> proposed = fresh_;
    align(before, {proposed.data(), proposed.size()}, ranks, fresh);
}

bool Worker::alike() const {
    const Ids capacity = request_.rules.capacity;
    const bool same = std::all_of(capacity.begin(), capacity.end(),
                                  [&](auto c) { return c == capacity[0]; });
    return same && request_.rules.apart != Apart::kNodes;
}

void Worker::write(std::int64_t layer) {
    const std::int64_t slots = request_.rules.shape.slots;
    const Span<std::int32_t> shares{answer_.shares + layer * slots,
                                    static_cast<std::size_t>(slots)};
    const Ids placement = board_.placement();
    std::copy(placement.begin(), placement.end(), answer_.placement + layer * slots);
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
