// Policies `br0` and `brh` (BR-0 and BR-H of BalanceRoute, arXiv 2605.06113), in two stages. While
// many slots are free, the worker with most of them takes the one request that suits it best; then
// workers take the subset of the first few requests that suits them best.
#include <algorithm>

#include "requests/horizon_score.h"

namespace equipoise::requests {
namespace {

// br0: how much the imbalance drops in this step if `size` tokens D join a worker: D - G (D - m)+ ,
// with G workers and m the margin of the worker.
class ImbalanceDrop {
 public:
    explicit ImbalanceDrop(const PolicySettings&) {}

    void begin(const RouterState& state) {
        loads_.clear();
        envelope_ = 0;
        workers_ = state.count_present();
        for (std::size_t w = 0; w < state.size(); ++w) {
            loads_.push_back(state.worker(w).all_load());
            envelope_ = std::max(envelope_, loads_.back());
        }
    }
    void add(std::size_t worker, std::int64_t size) {
        loads_[worker] += size;
        envelope_ = std::max(envelope_, loads_[worker]);
    }
    void select_worker(std::size_t worker) { margin_ = envelope_ - loads_[worker]; }
    std::int64_t score(std::int64_t size) const {
        return size - workers_ * std::max<std::int64_t>(0, size - margin_);
    }
    void finished(std::int64_t) {}

 private:
    std::vector<std::int64_t> loads_;
    std::int64_t envelope_ = 0, margin_ = 0, workers_ = 1;
};

// brh: the same over the next steps.
class HorizonDrop {
 public:
    explicit HorizonDrop(const PolicySettings& settings) : horizon_(settings, lengths_) {}

    void begin(const RouterState& state) { horizon_.project(state); }
    void add(std::size_t worker, std::int64_t size) { horizon_.add(worker, size); }
    void select_worker(std::size_t worker) { horizon_.select_worker(worker); }
    double score(std::int64_t size) const { return horizon_.score(size); }
    void finished(std::int64_t made) { lengths_.add(made); }

 private:
    OutputLengths lengths_;
    HorizonScore horizon_;
};

template <typename Scores>
class BalanceRoutePolicy final : public Policy {
 public:
    explicit BalanceRoutePolicy(const PolicySettings& settings)
        : settings_(settings), scores_(settings) {}

    void dispatch(RouterState& state) override {
        if (state.free_slots() == 0) return;
        scores_.begin(state);
        stuck_.assign(state.size(), 0);
        // A worker that has room for none of the requests is passed over until the next decision.
        while (state.pooled() > 0) {
            const std::int32_t w = next_worker(state);
            if (w < 0) return;
            scores_.select_worker(static_cast<std::size_t>(w));
            const bool many = state.free_slots() > settings_.greedy_slots;
            if (!(many ? bind_one(state, w) : bind_subset(state, w))) stuck_[w] = 1;
        }
    }

    void finished(std::int64_t made) override { scores_.finished(made); }

 private:
    // Returns the worker with most free slots, then with the lowest load, which is the largest
    // margin.
    std::int32_t next_worker(const RouterState& state) const {
        std::int32_t best = -1;
        for (std::size_t w = 0; w < state.size(); ++w) {
            const Worker& worker = state.worker(w);
            if (worker.free_slots() == 0 || stuck_[w]) continue;
            if (best >= 0) {
                const Worker& other = state.worker(best);
                if (worker.free_slots() < other.free_slots()) continue;
                if (worker.free_slots() == other.free_slots() &&
                    worker.all_load() >= other.all_load())
                    continue;
            }
            best = static_cast<std::int32_t>(w);
        }
        return best;
    }

    void bind(RouterState& state, std::int32_t request, std::int32_t worker) {
        const std::int64_t assumed_front_ends = state.worker(worker).assumed_front_ends;
        scores_.add(static_cast<std::size_t>(worker),
                    assumed_front_ends * state.request(request).size);
        state.bind(request, worker);
    }

    // Binds the request with the best score of the first `candidates`.
    bool bind_one(RouterState& state, std::int32_t w) {
        std::int32_t best = -1;
        decltype(scores_.score(0)) highest{};
        std::int64_t left = settings_.candidates;
        for (std::int32_t r = state.first(); r >= 0 && left-- > 0; r = state.after(r)) {
            if (!state.fits(state.worker(w), state.request(r))) continue;
            const auto score = scores_.score(state.request(r).size);
            if (best >= 0 && score <= highest) continue;
            best = r;
            highest = score;
        }
        if (best >= 0) bind(state, best, w);
        return best >= 0;
    }

    // Binds the best subset of the first few requests: all 2^subset are tried, 16 requests at most.
    // If none gains anything, binds the best single one, so that no request starves.
    bool bind_subset(RouterState& state, std::int32_t w) {
        const Worker& worker = state.worker(w);
        first_.clear();
        for (std::int32_t r = state.first();
             r >= 0 && static_cast<std::int64_t>(first_.size()) < settings_.subset;
             r = state.after(r))
            first_.push_back(r);
        std::uint32_t best = 0;
        decltype(scores_.score(0)) highest{};
        for (std::uint32_t set = 1; set < 1u << first_.size(); ++set) {
            std::int64_t sum = 0;
            for (std::size_t i = 0; i < first_.size(); ++i)
                if (set >> i & 1) sum += state.request(first_[i]).size;
            if (__builtin_popcount(set) > worker.free_slots() ||
                worker.all_load() + sum > worker.room)
                continue;
            const auto score = scores_.score(sum);
            if (best != 0 && score <= highest) continue;
            best = set;
            highest = score;
        }
        if (best == 0) return false;
        if (highest <= 0) return bind_one_of_first(state, w);
        for (std::size_t i = 0; i < first_.size(); ++i)
            if (best >> i & 1) bind(state, first_[i], w);
        return true;
    }

    // Called only if a subset fits, so one of its requests does.
    bool bind_one_of_first(RouterState& state, std::int32_t w) {
        std::int32_t best = -1;
        decltype(scores_.score(0)) highest{};
        for (const std::int32_t r : first_) {
            const auto score = scores_.score(state.request(r).size);
            if (!state.fits(state.worker(w), state.request(r))) continue;
            if (best >= 0 && score <= highest) continue;
            best = r;
            highest = score;
        }
        bind(state, best, w);
        return true;
    }

    PolicySettings settings_;
    Scores scores_;
    std::vector<char> stuck_;
    std::vector<std::int32_t> first_;
};

}  // namespace

std::unique_ptr<Policy> make_balance_route(const PolicySettings& settings) {
    if (settings.name == "br0")
        return std::make_unique<BalanceRoutePolicy<ImbalanceDrop>>(settings);
    if (settings.name == "brh") return std::make_unique<BalanceRoutePolicy<HorizonDrop>>(settings);
    return nullptr;
}

}  // namespace equipoise::requests
