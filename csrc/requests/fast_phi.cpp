// Policy `fast_phi` (Fast-Phi of DP-BalanceRouter): chooses the worker on which a request is
// expected to overflow the envelope least over its life, the sum over h of S(h) (s + h - m_g(h))+ .
// S is the survival of outputs as observed, m_g(h) the margin to the largest expected load h steps
// ahead. The sum is taken at a few points of the output distribution, with trapezoid weights. Until
// a request has ended: the least load.
#include <algorithm>
#include <utility>

#include "requests/immediate_policy.h"
#include "requests/output_lengths.h"

namespace equipoise::requests {
namespace {

class FastPhiPolicy final : public ImmediatePolicy {
 public:
    explicit FastPhiPolicy(const PolicySettings& settings)
        : ImmediatePolicy(settings), points_(static_cast<std::size_t>(settings.points)) {}

    void finished(std::int64_t made) override { lengths_.add(made); }

 private:
    void before_choices(const RouterState& state) override {
        set_points();
        loads_.assign(state.size() * ahead_.size(), 0.0);
        envelope_.assign(ahead_.size(), 0.0);
        for (std::size_t w = 0; w < state.size(); ++w)
            for (std::size_t k = 0; k < ahead_.size(); ++k) {
                loads_[w * ahead_.size() + k] = expected_load(state, w, ahead_[k]);
                envelope_[k] = std::max(envelope_[k], loads_[w * ahead_.size() + k]);
            }
    }

    // Points are quantiles, so that they are dense where many outputs end.
    void set_points() {
        ahead_.clear();
        weights_.clear();
        if (lengths_.count() == 0) {
            ahead_.push_back(0);
            weights_.push_back(1.0);
            return;
        }
        for (std::size_t k = 0; k < points_; ++k)
            ahead_.push_back(k == 0 ? 0
                                    : lengths_.quantile(static_cast<double>(k) /
                                                        static_cast<double>(points_ - 1)));
        for (std::size_t k = 0; k < points_; ++k) {
            const std::int64_t low = ahead_[k == 0 ? 0 : k - 1];
            const std::int64_t high = ahead_[k + 1 == points_ ? k : k + 1];
            weights_.push_back(static_cast<double>(high - low) / 2 *
                               lengths_.survival(0, ahead_[k]));
        }
    }

    // The expected load of a worker, counting each request by the chance that it has not ended by
    // then.
    double expected_load(const RouterState& state, std::size_t w, std::int64_t ahead) const {
        const Worker& worker = state.worker(w);
        auto sum = static_cast<double>(worker.others_load);
        if (ahead == 0) return static_cast<double>(worker.all_load());
        const auto assumed_front_ends = static_cast<double>(worker.assumed_front_ends);
        for (const std::int32_t r : worker.members) {
            const Request& request = state.request(r);
            const double later = static_cast<double>(state.weight(request) + ahead);
            sum += assumed_front_ends * lengths_.survival(state.age(request), ahead) * later;
        }
        return sum;
    }

    std::int32_t choose(const RouterState& state, const Request& request) override {
        size_ = request.size;
        const std::size_t points = ahead_.size();
        const Worker* first = &state.worker(0);
        return least_scored(state, request, 0, [&](const Worker& worker) {
            const double* load = &loads_[static_cast<std::size_t>(&worker - first) * points];
            double sum = 0;
            for (std::size_t k = 0; k < points; ++k) {
                const auto later = static_cast<double>(request.size + ahead_[k]);
                sum += weights_[k] * std::max(0.0, later - (envelope_[k] - load[k]));
            }
            // If nothing overflows anywhere, the lightest worker.
            return std::pair(sum, worker.all_load());
        });
    }

    void after_bind(RouterState& state, std::int32_t worker) override {
        const auto assumed_front_ends =
            static_cast<double>(state.worker(worker).assumed_front_ends);
        for (std::size_t k = 0; k < ahead_.size(); ++k) {
            double& load = loads_[static_cast<std::size_t>(worker) * ahead_.size() + k];
            const double lives = lengths_.count() == 0 ? 1 : lengths_.survival(0, ahead_[k]);
            load += assumed_front_ends * lives * static_cast<double>(size_ + ahead_[k]);
            envelope_[k] = std::max(envelope_[k], load);
        }
    }

    std::size_t points_;
    OutputLengths lengths_;
    std::int64_t size_ = 0;
    std::vector<std::int64_t> ahead_;
    std::vector<double> weights_, loads_, envelope_;
};

}  // namespace

std::unique_ptr<Policy> make_fast_phi(const PolicySettings& settings) {
    return settings.name == "fast_phi" ? std::make_unique<FastPhiPolicy>(settings) : nullptr;
}

}  // namespace equipoise::requests
