#include "plan.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

#include "labels.h"
#include "planner.h"
#include "rounding.h"

namespace equipoise {
namespace {

class Worker {
 public:
    Worker(const Request& request, const Answer& answer)
        : request_(request),
          answer_(answer),
          board_(request.rules.shape, request.rules.capacity),
          leveller_(board_),
          improver_(board_, request.rules, request.aims),
          rounding_(board_),
          fresh_(request.rules.shape.slots) {}

    void plan(std::int64_t layer) {
        const Counts load = request_.row(request_.load, layer);
        const Ids before = installed(layer);
        if (request_.policy == Policy::kIncremental && before.data != nullptr) {
            board_.reset(load, before);
            improver_.run(request_.row(request_.score, layer), request_.allowance[layer]);
        } else {
            replan(layer, before);
            board_.reset(load, {fresh_.data(), fresh_.size()});
            if (request_.aims.split == Split::kLevel) leveller_.level();
        }
        write(layer, before);
    }

 private:
    Ids installed(std::int64_t layer) const {
        const auto slots = static_cast<std::size_t>(request_.rules.shape.slots);
        if (request_.installed == nullptr) return {nullptr, 0};
        return {request_.installed + layer * slots, slots};
    }

    void replan(std::int64_t layer, Ids before) {
        const Counts score = request_.row(request_.score, layer);
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

    bool alike() const {
        const Ids capacity = request_.rules.capacity;
        const bool same = std::all_of(capacity.begin(), capacity.end(),
                                      [&](auto c) { return c == capacity[0]; });
        return same && request_.rules.apart != Apart::kNodes;
    }

    void write(std::int64_t layer, Ids before) {
        const std::int64_t slots = request_.rules.shape.slots;
        const Span<std::int32_t> shares{answer_.shares + layer * slots,
                                        static_cast<std::size_t>(slots)};
        const Ids placement = board_.placement();
        std::copy(placement.begin(), placement.end(), answer_.placement + layer * slots);
        answer_.imbalance[layer] = rounding_.round(shares);
        answer_.moves[layer] = moves(before, placement);
    }

    std::int64_t moves(Ids before, Ids after) const {
        if (before.data == nullptr) return static_cast<std::int64_t>(after.size);
        if (std::equal(before.begin(), before.end(), after.begin())) return 0;
        return count_moves(before, after, request_.rules.shape.ranks);
    }

    const Request& request_;
    const Answer& answer_;
    Board board_;
    Leveller leveller_;
    Improver improver_;
    Rounding rounding_;
    std::vector<std::int32_t> fresh_;
};

// What the threads share: the next layer, and what went wrong.
struct Shift {
    std::atomic<std::int64_t> next{0};
    std::mutex failing;
    std::exception_ptr failure;
};

void work(const Request& request, const Answer& answer, Shift& shift) {
    try {
        Worker worker(request, answer);
        for (std::int64_t layer; (layer = shift.next++) < request.layers;) worker.plan(layer);
    } catch (...) {
        const std::lock_guard<std::mutex> alone(shift.failing);
        shift.failure = std::current_exception();
        shift.next = request.layers;
    }
}

}  // namespace

void plan_layers(const Request& request, const Answer& answer) {
    Shift shift;
    std::vector<std::thread> others;
    const std::int64_t threads = std::min<std::int64_t>(request.threads, request.layers);
    others.reserve(threads);
    try {
        for (std::int64_t i = 1; i < threads; ++i)
            others.emplace_back(work, std::cref(request), std::cref(answer), std::ref(shift));
    } catch (const std::system_error&) {
        // No more threads are to be had: those that there are do it all.
    }
    work(request, answer, shift);
    for (std::thread& other : others) other.join();
    if (shift.failure) std::rethrow_exception(shift.failure);
}

}  // namespace equipoise
