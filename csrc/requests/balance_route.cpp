// BR-0 and BR-H (BalanceRoute, arXiv 2605.06113): which waiting requests go to which worker, in two
// stages. While many slots are free, the worker with most of them takes the one request that suits
// it best; then workers choose the subset of the first few that suits them best.
#include <algorithm>

#include "requests/horizon_score.h"

namespace equipoise::requests {
namespace {

// How much the imbalance drops in this step when `size` tokens join the worker: D - G (D - m)+ .
class Drop {
 public:
    explicit Drop(const PolicySettings&) {}

    void begin(const Fleet& fleet) {
        loads_.clear();
        envelope_ = 0;
        workers_ = fleet.present();
        for (std::size_t w = 0; w < fleet.size(); ++w) {
            loads_.push_back(fleet.worker(w).all_load());
            envelope_ = std::max(envelope_, loads_.back());
        }
    }
    void add(std::size_t worker, std::int64_t size) {
        loads_[worker] += size;
        envelope_ = std::max(envelope_, loads_[worker]);
    }
    void face(std::size_t worker) { margin_ = envelope_ - loads_[worker]; }
    std::int64_t score(std::int64_t size) const {
        return size - workers_ * std::max<std::int64_t>(0, size - margin_);
    }
    void finished(std::int64_t) {}

 private:
    std::vector<std::int64_t> loads_;
    std::int64_t envelope_ = 0, margin_ = 0, workers_ = 1;
};

class Lookahead {
 public:
    explicit Lookahead(const PolicySettings& settings) : horizon_(settings, lengths_) {}

    void begin(const Fleet& fleet) { horizon_.project(fleet); }
    void add(std::size_t worker, std::int64_t size) { horizon_.add(worker, size); }
    void face(std::size_t worker) { horizon_.face(worker); }
    double score(std::int64_t size) const { return horizon_.score(size); }
    void finished(std::int64_t made) { lengths_.add(made); }

 private:
    Lengths lengths_;
    Horizon horizon_;
};

template <typename Scores>
class Balance final : public Policy {
 public:
    explicit Balance(const PolicySettings& settings) : settings_(settings), scores_(settings) {}

    void dispatch(Fleet& fleet) override {
        if (fleet.free() == 0) return;
        scores_.begin(fleet);
        stuck_.assign(fleet.size(), 0);
        // A worker whose room none of the requests fits is passed over until the next decision.
        while (fleet.pooled() > 0) {
            const std::int32_t w = next(fleet);
            if (w < 0) return;
            scores_.face(static_cast<std::size_t>(w));
            const bool many = fleet.free() > settings_.greedy_slots;
            if (!(many ? one(fleet, w) : several(fleet, w))) stuck_[w] = 1;
        }
    }

    void finished(std::int64_t made) override { scores_.finished(made); }

 private:
    // Most free slots, then the lowest load, which is the largest margin.
    std::int32_t next(const Fleet& fleet) const {
        std::int32_t best = -1;
        for (std::size_t w = 0; w < fleet.size(); ++w) {
            const Worker& worker = fleet.worker(w);
            if (worker.free() == 0 || stuck_[w]) continue;
            if (best >= 0) {
                const Worker& other = fleet.worker(best);
                if (worker.free() < other.free()) continue;
                if (worker.free() == other.free() && worker.all_load() >= other.all_load())
                    continue;
            }
            best = static_cast<std::int32_t>(w);
        }
        return best;
    }

    void join(Fleet& fleet, std::int32_t request, std::int32_t worker) {
        const std::int64_t alike = fleet.worker(worker).alike;
        scores_.add(static_cast<std::size_t>(worker), alike * fleet.request(request).size);
        fleet.bind(request, worker);
    }

    bool one(Fleet& fleet, std::int32_t w) {
        std::int32_t best = -1;
        decltype(scores_.score(0)) highest{};
        std::int64_t left = settings_.candidates;
        for (std::int32_t r = fleet.first(); r >= 0 && left-- > 0; r = fleet.after(r)) {
            if (!fleet.fits(fleet.worker(w), fleet.request(r))) continue;
            const auto score = scores_.score(fleet.request(r).size);
            if (best >= 0 && score <= highest) continue;
            best = r;
            highest = score;
        }
        if (best >= 0) join(fleet, best, w);
        return best >= 0;
    }

    // The best subset of the first few; where none gains anything, the best single one, so that
    // nobody starves.
    bool several(Fleet& fleet, std::int32_t w) {
        const Worker& worker = fleet.worker(w);
        first_.clear();
        for (std::int32_t r = fleet.first();
             r >= 0 && static_cast<std::int64_t>(first_.size()) < settings_.subset;
             r = fleet.after(r))
            first_.push_back(r);
        std::uint32_t best = 0;
        decltype(scores_.score(0)) highest{};
        for (std::uint32_t set = 1; set < 1u << first_.size(); ++set) {
            std::int64_t sum = 0;
            for (std::size_t i = 0; i < first_.size(); ++i)
                if (set >> i & 1) sum += fleet.request(first_[i]).size;
            if (__builtin_popcount(set) > worker.free() || worker.all_load() + sum > worker.room)
                continue;
            const auto score = scores_.score(sum);
            if (best != 0 && score <= highest) continue;
            best = set;
            highest = score;
        }
        if (best == 0) return false;
        if (highest <= 0) return one_of_first(fleet, w);
        for (std::size_t i = 0; i < first_.size(); ++i)
            if (best >> i & 1) join(fleet, first_[i], w);
        return true;
    }

    bool one_of_first(Fleet& fleet, std::int32_t w) {
        std::int32_t best = -1;
        decltype(scores_.score(0)) highest{};
        for (const std::int32_t r : first_) {
            const auto score = scores_.score(fleet.request(r).size);
            if (!fleet.fits(fleet.worker(w), fleet.request(r))) continue;
            if (best >= 0 && score <= highest) continue;
            best = r;
            highest = score;
        }
        join(fleet, best, w);
        return true;
    }

    PolicySettings settings_;
    Scores scores_;
    std::vector<char> stuck_;
    std::vector<std::int32_t> first_;
};

}  // namespace

std::unique_ptr<Policy> make_balance(const PolicySettings& settings) {
    if (settings.name == "br0") return std::make_unique<Balance<Drop>>(settings);
    if (settings.name == "brh") return std::make_unique<Balance<Lookahead>>(settings);
    return nullptr;
}

}  // namespace equipoise::requests
